"""Small models with seeded random weights: KV that means something, without a download.

`qwen2` is grouped-query attention and caches K and V. `mla` is DeepSeek-V3's multi-head latent attention with a small
mixture of experts, and caches what such an engine caches: per token and layer one latent of 64 elements, after its norm,
and one rotated key of 16, shared by all heads. Per-head keys and values are made from them in every step, by the
library's own layer, and kept nowhere.

Plain random weights prove nothing: with the usual initialisation a model repeats one token whatever the cache holds. The
weights here are drawn wider (`WEIGHT_STD`), which makes greedy decoding sensitive: most generated tokens are distinct,
and one overwritten page of KV changes them.

What is compared. A run of `count` decode steps has `count + 1` output tokens: the first comes from prefill's logits and
travels as metadata, the others come from decode steps over the KV. `undivided` gives all of them from one plain run,
`prefill` gives the first and the KV, `generate` the rest from a KV array alone.

KV arrays are float32 `[layers, kv, tokens, heads, dim]`: `[layers, 2, tokens, kv_heads, 32]` with kv 0 = K and 1 = V, or
`[layers, 1, tokens, 1, 80]` for a latent and its rotated key, in this order. float32 on one thread with eager attention
and eager experts is bit-reproducible: equal KV gives equal tokens in any process of the same machine. Routing to experts
is a choice and could jump at the smallest difference; from equal bits it chooses equally. The same holds on a GPU, in
float32 without TF32 and by PyTorch's deterministic algorithms, between GPUs of one kind; between a GPU and the CPU it
does not.

On a GPU the model has a stream of its own. `launch` returns while its kernels still run, and `record` says on the GPU
itself when they are through.

torch and transformers are imported when a model is built, never by importing this module. They take seconds, so a
parent that wants several processes calls `warm` and then forks: nothing here starts a thread. A model on a GPU is built
by the process that uses it, after the fork.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rdma_kv.errors import ConfigError, LocalProtocolError
from rdma_kv.topology import ModelSpec

KvArray = npt.NDArray[np.float32]

MODELS = ("qwen2", "mla")
KV_HEADS = (1, 2, 4, 8)
DEFAULT_KV_HEADS = 4
QUERY_HEADS = 8
HEAD_DIM = 32  # mla: of V and of the part of K that is not rotated
LATENT_RANK = 64
LATENT_ROPE = 16  # elements of the one rotated key
LATENT_DIM = LATENT_RANK + LATENT_ROPE
QUERY_RANK = 96  # of mla
EXPERTS = 4  # of mla, beside one for all tokens; the first layer is dense
EXPERTS_PER_TOKEN = 2
VOCAB = 512
MAX_POSITIONS = 1024
ROPE_THETA = 10_000.0
WEIGHT_STD = 0.08
"""Four times the usual 0.02: about 15 of 16 greedy tokens are distinct with both models; with 0.02 qwen2 has about 2."""

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
        kv_heads: total K of the model, one of `KV_HEADS`; there are 8 query heads of 32 elements. A latent counts as one
            head: with `mla` it is 1, whether that or the default is given, and nothing else is taken.
        model: one of `MODELS`.

    Raises:
        ConfigError: a value that cannot work, under the name of its option.
    """

    seed: int = 0
    layers: int = 4
    kv_heads: int = DEFAULT_KV_HEADS
    model: str = "qwen2"

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError("--model", f"unknown {self.model!r}; use one of {', '.join(MODELS)}")
        if self.seed < 0:
            raise ConfigError("--seed", f"{self.seed} is negative")
        if self.layers < 1:
            raise ConfigError("--layers", f"{self.layers}; the model needs a layer")
        if self.model == "mla":
            if self.kv_heads not in {1, DEFAULT_KV_HEADS}:
                raise ConfigError("--kv-heads", f"{self.kv_heads}; mla keeps one latent for all heads, leave it out")
            object.__setattr__(self, "kv_heads", 1)
        elif self.kv_heads not in KV_HEADS:
            raise ConfigError("--kv-heads", f"{self.kv_heads}; use one of {', '.join(map(str, KV_HEADS))}")

    @property
    def fingerprint(self) -> str:
        """Covers config, rope and weights: 32 hex digits."""
        parts: tuple[object, ...] = (self.model, self.seed, self.layers, self.kv_heads, QUERY_HEADS, HEAD_DIM, VOCAB)
        parts += (ROPE_THETA, WEIGHT_STD)
        if self.model == "mla":
            parts += (LATENT_RANK, LATENT_ROPE, QUERY_RANK, EXPERTS, EXPERTS_PER_TOKEN)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def spec(self) -> ModelSpec:
        """One float32 component `kv`: rows of 128 bytes, or a replicated latent of 320 bytes."""
        if self.model == "mla":
            return ModelSpec.mla(
                layers=self.layers,
                latent_dim=LATENT_DIM,
                itemsize=4,
                dtype="float32",
                fingerprint=self.fingerprint,
            )
        return ModelSpec.gqa(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            itemsize=4,
            dtype="float32",
            fingerprint=self.fingerprint,
        )

    def kv_shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of the KV array of `tokens` tokens, `[layers, kv, tokens, heads, dim]`."""
        if self.model == "mla":
            return self.layers, 1, tokens, 1, LATENT_DIM
        return self.layers, 2, tokens, self.kv_heads, HEAD_DIM

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


class Launched(NamedTuple):
    """A prefill whose kernels may still run. Tensors of torch on the model's device, valid on the model's stream.

    Attributes:
        kv: float32 of the shape's `kv_shape`.
        logits: of the last position, `[vocab]`.
    """

    kv: Any
    logits: Any


class DemoModel:
    """The model, ready to run. Building it imports torch and transformers (5-8 s the first time in a process).

    Sets torch to one thread for the whole process: results stay bit-reproducible and a later `fork` is safe.

    Args:
        gpu: CUDA ordinal of the GPU that it runs on; None is the CPU. Sets torch to deterministic algorithms for the whole
            process; `devices.prepare` comes first.
    """

    def __init__(
        self,
        seed: int = 0,
        layers: int = 4,
        kv_heads: int = DEFAULT_KV_HEADS,
        model: str = "qwen2",
        *,
        gpu: int | None = None,
    ) -> None:
        self.shape = ModelShape(seed, layers, kv_heads, model)
        self.gpu = gpu
        self._family = _FAMILIES[model]
        self._torch, self._new_cache, self._model = _build(self.shape, self._family)
        self._device = "cpu" if gpu is None else f"cuda:{gpu}"
        self._stream: Any = None
        if gpu is not None:
            self._stream = _move(self._torch, self._model, self._device)
        names = inspect.signature(self._model.forward).parameters
        # Later versions of transformers 5 have renamed it, and warn.
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    def spec(self) -> ModelSpec:
        return self.shape.spec()

    def prompts(self, requests: int, seed: int) -> list[list[int]]:
        return self.shape.prompts(requests, seed)

    def prefill(self, tokens: Sequence[int]) -> Prefilled:
        """Run a whole prompt once.

        Returns:
            KV of all its tokens, a float32 array of the shape's `kv_shape` that the caller owns, and the greedy token
            that follows.

        Raises:
            ConfigError: the installed transformers does not cache latents.
        """
        launched = self.launch(tokens)
        first, extras = self.output(launched)
        return Prefilled(self.fetch(launched), first, extras)

    def launch(self, tokens: Sequence[int]) -> Launched:
        """Begin to run a whole prompt once. On the CPU it is over when this returns, on a GPU it may not be.

        Raises:
            ConfigError: the installed transformers does not cache latents.
        """
        cache = self._new_cache()
        with self.scope(), self._torch.inference_mode():
            logits = self._forward(tokens, cache)
            layers = [self._family.join(self._torch, layer.keys[0], layer.values[0]) for layer in cache.layers]
            kv = self._torch.stack(layers).transpose(2, 3).contiguous()  # from [layers, kv, heads, tokens, dim]
        return Launched(kv, logits)

    def record(self) -> Any:  # noqa: ANN401  torch is not typed here
        """A CUDA event behind everything that was launched so far on the model's stream; None on the CPU."""
        if self._stream is None:
            return None
        event = self._torch.cuda.Event()
        event.record(self._stream)
        return event

    def output(self, launched: Launched) -> tuple[int, dict[str, int | float | str]]:
        """The greedy token that follows, and metadata. Waits for the model's stream."""
        with self.scope():
            first = int(launched.logits.argmax())
            extras: dict[str, int | float | str] = {
                "prompt_tokens": launched.kv.shape[2],
                "first_logit": float(launched.logits[first]),
                "model": self.shape.fingerprint,
            }
        return first, extras

    def fetch(self, launched: Launched) -> KvArray:
        """The KV in host memory, float32 of the shape's `kv_shape`. Waits for the model's stream."""
        with self.scope():
            kv: KvArray = launched.kv.cpu().numpy()
        return kv

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Inside, torch on this thread launches to the model's stream; nothing on the CPU."""
        if self._stream is None:
            yield
            return
        # The device first: leaving a stream sets the device that was current, and would start CUDA on the first GPU too.
        with self._torch.cuda.device(self.gpu), self._torch.cuda.stream(self._stream):
            yield

    def generate(self, kv: KvArray, first_token: int, count: int) -> list[int]:
        """Greedy tokens of `count` decode steps over nothing but `kv` and the first token; `kv` is only read.

        Args:
            kv: float32 of the shape's `kv_shape`, all tokens of the prompt.
        """
        expected = self.shape.kv_shape(kv.shape[2] if kv.ndim == 5 else 0)
        if kv.shape != expected or kv.dtype != np.float32:
            raise LocalProtocolError(f"kv is {kv.dtype} {kv.shape}; the model takes float32 {expected}")
        with self.scope():
            cache = self._new_cache()
            for index, layer in enumerate(kv.swapaxes(2, 3)):
                planes = (self._torch.from_numpy(plane.copy())[None] for plane in self._family.split(layer))
                keys, values = (plane.to(self._device) for plane in planes)
                cache.update(keys, values, index)
            return self._decode(cache, first_token, count)

    def undivided(self, tokens: Sequence[int], count: int) -> list[int]:
        """The reference: `count + 1` tokens of one run in which the KV never leaves the model's own cache."""
        with self.scope():
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
        """Logits of the last position, `[vocab]`; `cache` grows by `tokens`. On a GPU inside `scope`."""
        if not tokens or not all(0 <= token < VOCAB for token in tokens):
            raise LocalProtocolError(f"needs at least one token, each in 0..{VOCAB - 1}")
        if cache.get_seq_length() + len(tokens) > MAX_POSITIONS:
            raise LocalProtocolError(f"more than {MAX_POSITIONS} positions")
        with self._torch.inference_mode():
            ids = self._torch.tensor([list(tokens)], device=self._device)
            arguments = {self._cache_argument: cache, "use_cache": True, "logits_to_keep": 1}
            return self._model(input_ids=ids, **arguments).logits[0, -1]


def warm(shape: ModelShape, gpu: int | None = None) -> DemoModel:
    """Import, build and run once, so that children made by `os.fork` start in milliseconds and use the same model.

    Starts no thread and opens no socket; fork before anything else does (a NIXL agent, an event loop's executor). A model
    on a GPU is for the process that calls this, not for its children.

    Raises:
        ConfigError: the installed transformers does not cache latents.
    """
    model = DemoModel(shape.seed, shape.layers, shape.kv_heads, shape.model, gpu=gpu)
    kv, first, _ = model.prefill([0, 1])
    model.generate(kv, first, 1)
    return model


class _Family(NamedTuple):
    """One architecture: how it is made, and what its cache holds.

    `join` (of torch's tensors) and `split` (of NumPy's arrays) go between the two tensors of a layer's cache, each `[heads,
    tokens, dim]`, and the layer's KV `[kv, heads, tokens, dim]`.
    """

    make: Callable[[ModelShape], Any]
    join: Callable[[Any, Any, Any], Any]
    split: Callable[[KvArray], tuple[KvArray, KvArray]]


def _make_qwen2(shape: ModelShape) -> Any:  # noqa: ANN401  torch is not typed here
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
    return Qwen2ForCausalLM(config)


def _make_mla(shape: ModelShape) -> Any:  # noqa: ANN401  torch is not typed here
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=QUERY_HEADS * HEAD_DIM,
        intermediate_size=2 * QUERY_HEADS * HEAD_DIM,
        num_hidden_layers=shape.layers,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=QUERY_HEADS,  # after the latents are expanded
        q_lora_rank=QUERY_RANK,
        kv_lora_rank=LATENT_RANK,
        qk_nope_head_dim=HEAD_DIM,
        qk_rope_head_dim=LATENT_ROPE,
        v_head_dim=HEAD_DIM,
        first_k_dense_replace=1,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=QUERY_HEADS * HEAD_DIM // EXPERTS_PER_TOKEN,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        attn_implementation="eager",
        experts_implementation="eager",  # the default picks a kernel by what the machine has
    )
    return DeepseekV3ForCausalLM(config)


def _join_heads(torch: Any, keys: Any, values: Any) -> Any:  # noqa: ANN401  torch is not typed here
    return torch.stack([keys, values])


def _split_heads(layer: KvArray) -> tuple[KvArray, KvArray]:
    return layer[0], layer[1]


def _join_latent(torch: Any, latents: Any, rotated: Any) -> Any:  # noqa: ANN401  torch is not typed here
    """The cache's `keys` are latents and its `values` rotated keys, one head each."""
    if (latents.shape[0], latents.shape[2], rotated.shape[2]) != (1, LATENT_RANK, LATENT_ROPE):
        raise ConfigError("transformers", "this version caches expanded keys and values for mla; use 5.15 or later")
    return torch.cat([latents, rotated], dim=-1)[None]


def _split_latent(layer: KvArray) -> tuple[KvArray, KvArray]:
    return layer[0, ..., :LATENT_RANK], layer[0, ..., LATENT_RANK:]


_FAMILIES = {
    "qwen2": _Family(_make_qwen2, _join_heads, _split_heads),
    "mla": _Family(_make_mla, _join_latent, _split_latent),
}


def _build(shape: ModelShape, family: _Family) -> tuple[Any, Any, Any]:
    """(torch, the class of a KV cache, the model in eval mode)."""
    import torch

    torch.set_num_threads(1)  # before the first op: a pool of threads that exists is not shut down again
    from transformers.cache_utils import DynamicCache

    with torch.random.fork_rng(devices=[]):  # the constructor draws weights of its own; the caller's state stays
        model = family.make(shape).to(torch.float32).eval()
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.from_numpy(_weights(shape.seed, name, tuple(parameter.shape))))
    return torch, DynamicCache, model.requires_grad_(False)


def _move(torch: Any, model: Any, device: str) -> Any:  # noqa: ANN401  torch is not typed here
    """Put a model on a GPU, with arithmetic that gives the same bits every time; the stream that it will run on."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    # An operation that knows no such algorithm only warns: that of another version of transformers must not end the demo,
    # which finds out by itself whether tokens are equal.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid, that costs a kernel each time
    model.to(device)
    torch.cuda.synchronize(device)
    return torch.cuda.Stream(device)


def _weights(seed: int, name: str, size: tuple[int, ...]) -> KvArray:
    """Drawn by NumPy and by name: the same whatever order the library builds its parameters in."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return rng.standard_normal(size, np.float32) * np.float32(WEIGHT_STD)
