"""A small Qwen2 model with seeded random weights: KV that means something, without a download.

Plain random weights prove nothing: with the usual initialisation a model repeats one token whatever the cache holds. The
weights here are drawn wider (`WEIGHT_STD`), which makes greedy decoding sensitive: most generated tokens are distinct,
and one overwritten page of KV changes them.

What is compared. A run of `count` decode steps has `count + 1` output tokens: the first comes from prefill's logits and
travels as metadata, the others come from decode steps over the KV. `undivided` gives all of them from one plain run,
`prefill` gives the first and the KV, `generate` the rest from a KV array alone.

KV arrays are float32 `[layers, kv, tokens, kv_heads, head_dim]`, with kv 0 = K and 1 = V. float32 on one thread with
eager attention is bit-reproducible: equal KV gives equal tokens in any process of the same machine.

torch and transformers are imported when a model is built, never by importing this module. They take seconds, so a
parent that wants several processes calls `warm` and then forks: nothing here starts a thread.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rdma_kv.errors import ConfigError, LocalProtocolError
from rdma_kv.topology import ModelSpec

KvArray = npt.NDArray[np.float32]

KV_HEADS = (1, 2, 4, 8)
QUERY_HEADS = 8
HEAD_DIM = 32
VOCAB = 512
MAX_POSITIONS = 1024
ROPE_THETA = 10_000.0
WEIGHT_STD = 0.08
"""Four times the usual 0.02: about 15 of 16 greedy tokens are distinct; with 0.02 it is about 2 of 16."""

SHORTEST_PROMPT = 24
LONGEST_PROMPT = 120
_ROUND_PAGE = 16  # no prompt is a multiple of it, but every eighth, whose last page is full
_MAX_REQUESTS = 4096


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything that decides the weights; equal shapes are the same model in every process. Needs no torch.

    Attributes:
        seed: of the weights.
        layers: decoder layers.
        kv_heads: total K of the model, one of `KV_HEADS`; there are 8 query heads of 32 elements.

    Raises:
        ConfigError: a value that cannot work, under the name of its option.
    """

    seed: int = 0
    layers: int = 4
    kv_heads: int = 4

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError("--seed", f"{self.seed} is negative")
        if self.layers < 1:
            raise ConfigError("--layers", f"{self.layers}; the model needs a layer")
        if self.kv_heads not in KV_HEADS:
            raise ConfigError("--kv-heads", f"{self.kv_heads}; use one of {', '.join(map(str, KV_HEADS))}")

    @property
    def fingerprint(self) -> str:
        """Covers config, rope and weights: 32 hex digits."""
        parts = ("qwen2", self.seed, self.layers, self.kv_heads, QUERY_HEADS, HEAD_DIM, VOCAB, ROPE_THETA, WEIGHT_STD)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def spec(self) -> ModelSpec:
        """One float32 component `kv` with rows of 128 bytes."""
        return ModelSpec.gqa(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            itemsize=4,
            dtype="float32",
            fingerprint=self.fingerprint,
        )

    def prompts(self, requests: int, seed: int) -> list[list[int]]:
        """Random prompts of 24..120 tokens.

        Lengths repeat only after all have been used, so up to 80 requests have lengths of their own. They are no
        multiples of 16 (the last page is partial for all usual page sizes), but for every eighth request.
        """
        if not 1 <= requests <= _MAX_REQUESTS:
            raise ConfigError("--requests", f"{requests}; use 1..{_MAX_REQUESTS}")
        rng = np.random.default_rng([seed, 1])
        lengths = np.arange(SHORTEST_PROMPT, LONGEST_PROMPT + 1)
        partial = rng.permutation(lengths[lengths % _ROUND_PAGE != 0])
        full = rng.permutation(lengths[lengths % _ROUND_PAGE == 0])
        sizes = [full[i // 8 % len(full)] if i % 8 == 7 else partial[i % len(partial)] for i in range(requests)]
        return [[int(token) for token in rng.integers(0, VOCAB, size)] for size in sizes]


class Prefilled(NamedTuple):
    """What prefill leaves behind: the KV, the first output token, and metadata for FINISH (plain values only)."""

    kv: KvArray
    first_token: int
    extras: dict[str, int | float | str]


class DemoModel:
    """The model, ready to run. Building it imports torch and transformers (5-8 s the first time in a process).

    Sets torch to one thread for the whole process: results stay bit-reproducible and a later `fork` is safe.
    """

    def __init__(self, seed: int = 0, layers: int = 4, kv_heads: int = 4) -> None:
        self.shape = ModelShape(seed, layers, kv_heads)
        self._torch, self._new_cache, self._model = _build(self.shape)

    def spec(self) -> ModelSpec:
        return self.shape.spec()

    def prompts(self, requests: int, seed: int) -> list[list[int]]:
        return self.shape.prompts(requests, seed)

    def prefill(self, tokens: Sequence[int]) -> Prefilled:
        """Run a whole prompt once.

        Returns:
            KV of all its tokens, a float32 array `[layers, 2, tokens, kv_heads, head_dim]` that the caller owns, and
            the greedy token that follows.
        """
        cache = self._new_cache()
        logits = self._forward(tokens, cache)
        kv = np.empty((self.shape.layers, 2, len(tokens), self.shape.kv_heads, HEAD_DIM), np.float32)
        for index, layer in enumerate(cache.layers):
            kv[index, 0] = layer.keys[0].transpose(0, 1).numpy()  # kept as [1, kv_heads, tokens, head_dim]
            kv[index, 1] = layer.values[0].transpose(0, 1).numpy()
        first = int(logits.argmax())
        extras: dict[str, int | float | str] = {
            "prompt_tokens": len(tokens),
            "first_logit": float(logits[first]),
            "model": self.shape.fingerprint,
        }
        return Prefilled(kv, first, extras)

    def generate(self, kv: KvArray, first_token: int, count: int) -> list[int]:
        """Greedy tokens of `count` decode steps over nothing but `kv` and the first token; `kv` is only read.

        Args:
            kv: float32 `[layers, 2, tokens, kv_heads, head_dim]`, all tokens of the prompt.
        """
        expected = (self.shape.layers, 2, kv.shape[2] if kv.ndim == 5 else 0, self.shape.kv_heads, HEAD_DIM)
        if kv.shape != expected or kv.dtype != np.float32:
            raise LocalProtocolError(f"kv is {kv.dtype} {kv.shape}; the model takes float32 {expected}")
        cache = self._new_cache()
        for index, layer in enumerate(kv.transpose(0, 1, 3, 2, 4)):
            keys, values = (self._torch.from_numpy(plane.copy())[None] for plane in layer)
            cache.update(keys, values, index)
        return self._decode(cache, first_token, count)

    def undivided(self, tokens: Sequence[int], count: int) -> list[int]:
        """The reference: `count + 1` tokens of one run in which the KV never leaves the model's own cache."""
        cache = self._new_cache()
        first = int(self._forward(tokens, cache).argmax())
        return [first, *self._decode(cache, first, count)]

    def _decode(self, cache: Any, token: int, count: int) -> list[int]:  # noqa: ANN401  torch is not typed here
        generated = []
        for _ in range(count):
            token = int(self._forward([token], cache).argmax())
            generated.append(token)
        return generated

    def _forward(self, tokens: Sequence[int], cache: Any) -> Any:  # noqa: ANN401  torch is not typed here
        """Logits of the last position, `[vocab]`; `cache` grows by `tokens`."""
        if not tokens or not all(0 <= token < VOCAB for token in tokens):
            raise LocalProtocolError(f"needs at least one token, each in 0..{VOCAB - 1}")
        if cache.get_seq_length() + len(tokens) > MAX_POSITIONS:
            raise LocalProtocolError(f"more than {MAX_POSITIONS} positions")
        with self._torch.inference_mode():
            ids = self._torch.tensor([list(tokens)])
            return self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]


def warm(shape: ModelShape) -> DemoModel:
    """Import, build and run once, so that children made by `os.fork` start in milliseconds and use the same model.

    Starts no thread and opens no socket; fork before anything else does (a NIXL agent, an event loop's executor).
    """
    model = DemoModel(shape.seed, shape.layers, shape.kv_heads)
    model.undivided([0, 1], 1)
    return model


def _build(shape: ModelShape) -> tuple[Any, Any, Any]:
    """(torch, the class of a KV cache, the model in eval mode)."""
    import torch

    torch.set_num_threads(1)  # before the first op: a pool of threads that exists is not shut down again
    from transformers.cache_utils import DynamicCache
    from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=QUERY_HEADS * HEAD_DIM,
        intermediate_size=2 * QUERY_HEADS * HEAD_DIM,
        num_hidden_layers=shape.layers,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):  # the constructor draws weights of its own; the caller's state stays
        model = Qwen2ForCausalLM(config).to(torch.float32).eval()
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.from_numpy(_weights(shape.seed, name, tuple(parameter.shape))))
    return torch, DynamicCache, model.requires_grad_(False)


def _weights(seed: int, name: str, size: tuple[int, ...]) -> KvArray:
    """Drawn by NumPy and by name: the same whatever order the library builds its parameters in."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return rng.standard_normal(size, np.float32) * np.float32(WEIGHT_STD)
