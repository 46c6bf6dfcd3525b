"""The shapes that the demo, its tests and the README go through: one list.

Each is a pair of engines that differ in something that real deployments differ in. `rdma-kv demo --shape NAME` runs one,
`rdma-kv demo --all` (`make demo-all`) all of them.
"""

from __future__ import annotations

from typing import NamedTuple

from rdma_kv.errors import ConfigError


class Shape(NamedTuple):
    """One pair of engines, in the notation of `--prefill` and `--decode`.

    Attributes:
        what: what differs, for people.
        kv_heads: KV heads of the model; not used by an MLA model.
    """

    name: str
    what: str
    model: str
    prefill: str
    decode: str
    kv_heads: int = 4


SHAPES = (
    Shape("plain", "one rank each", "qwen2", "tp=1", "tp=1"),
    Shape("dp", "DP replicas of two ranks into DP replicas", "qwen2", "tp=4,dp=2", "tp=4,dp=2"),
    Shape("tp-up", "attention TP 2 to 4", "qwen2", "tp=2", "tp=4"),
    Shape("tp-down", "attention TP 4 to 1, HND to NHD", "qwen2", "tp=4,layout=hnd", "tp=2,dp=2,layout=nhd"),
    Shape("few-heads", "2 KV heads on 8 ranks, to 4", "qwen2", "tp=8", "tp=4", kv_heads=2),
    Shape("replicated-heads", "one rank into 4 ranks of 2 heads", "qwen2", "tp=1", "tp=4", kv_heads=2),
    Shape("pages-down", "64 tokens a page to 16", "qwen2", "tp=2,page=64", "tp=2,page=16"),
    Shape("pages-up", "16 tokens a page to 32, DP on both sides", "qwen2", "dp=2,page=16", "tp=4,dp=2,page=32"),
    Shape("stages", "uneven pipeline stages to TP", "qwen2", "pp=2,layers=3+1", "tp=2,page=16"),
    Shape("to-stages", "TP to uneven pipeline stages", "qwen2", "tp=4", "tp=2,pp=3,layers=1+2+1"),
    Shape("lightllm-out", "LightLLM's token slots to vLLM HND", "qwen2", "tp=2,layout=lightllm", "tp=4,layout=hnd"),
    Shape("lightllm-in", "vLLM NHD to LightLLM's token slots", "qwen2", "tp=2,layout=nhd", "dp=2,layout=lightllm"),
    Shape("sglang-out", "SGLang's split K and V to HND", "qwen2", "tp=2,layout=sglang", "tp=1,layout=hnd"),
    Shape("sglang-in", "HND to SGLang's split K and V", "qwen2", "tp=1,layout=hnd", "tp=2,layout=sglang"),
    Shape("trtllm", "TensorRT-LLM's blocks on both sides", "qwen2", "tp=2,layout=trtllm", "dp=2,page=16,layout=trtllm"),
    Shape("mla-tep-dep", "MLA, context TEP to generation DEP", "mla", "tp=4", "tp=4,dp=4"),
    Shape("mla-tep-dp2", "MLA, TEP 4 to DP 2 of two ranks", "mla", "tp=4,page=64", "tp=4,dp=2,page=16"),
    Shape("mla-stages", "MLA over uneven stages", "mla", "tp=2,pp=2,layers=3+1", "dp=2"),
)


def shape(name: str) -> Shape:
    """Raises ConfigError where the list has no such shape."""
    for candidate in SHAPES:
        if candidate.name == name:
            return candidate
    raise ConfigError("--shape", f"unknown shape {name!r}; use {', '.join(s.name for s in SHAPES)}")
