"""Where KV lives: the ranks of an engine, the components of a model, and who holds which layers and heads.

Pure arithmetic, the same on both sides of a transfer. Rank order is decided in one place, `Topology.rank`: `pp` is
outermost, then `cp`, then `tp`. `dp` is the number of attention-DP replicas *inside* the TP group; attention TP is
`tp // dp`. `dp = 1` is plain TP (or TEP), `dp = tp` is DEP. An engine that counts DP outside TP maps to
`Topology(tp=dp * tp, dp=dp)`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from rdma_kv.errors import ConfigError
from rdma_kv.types import Interval, Owned

MAX_RANKS = 1 << 16
MAX_LAYERS = 1 << 12
MAX_KV_HEADS = 1 << 16


class TieBreak(StrEnum):
    """Which of several holders of one head sends: by decode replica, or by the hash of the transfer key."""

    REPLICA = "replica"
    KEY = "key"


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """How context parallelism spreads token positions over its ranks.

    Attributes:
        interleave: 0 for `contiguous` (pages are split floor(n / cp), the rest to the lowest ranks), otherwise k for
            `interleaved by k tokens` (position t belongs to rank `t // k % cp`).
    """

    interleave: int = 0

    def __post_init__(self) -> None:
        if self.interleave < 0:
            raise ConfigError(
                "cp_split", f"interleave of {self.interleave} tokens; use 0 (contiguous) or a positive number"
            )

    @classmethod
    def parse(cls, text: str) -> ContextSplit:
        """`contiguous` or `interleaved:K`; anything else is refused by name."""
        if text == "contiguous":
            return cls(0)
        kind, _, tokens = text.partition(":")
        if kind == "interleaved" and re.fullmatch("0*[1-9][0-9]{0,8}", tokens):
            return cls(int(tokens))
        raise ConfigError("cp_split", f"unknown split {text!r}; use 'contiguous' or 'interleaved:K'")

    def __str__(self) -> str:
        return f"interleaved:{self.interleave}" if self.interleave else "contiguous"


@dataclass(frozen=True, slots=True)
class Topology:
    """The parallel layout of one engine.

    Attributes:
        layers_per_stage: global layers of each pipeline stage, in order; its length is `pp`. Uneven is fine.
        cp_split: how positions spread over context-parallel ranks.

    Raises:
        ConfigError: a size below 1, `dp` that does not divide `tp`, or another number of stages than `pp`.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    layers_per_stage: tuple[int, ...] = (1,)
    cp_split: ContextSplit = ContextSplit()

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "dp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(name, f"{value!r} is not a positive whole number")
        if self.tp % self.dp:
            raise ConfigError(
                "dp", f"{self.dp} does not divide tp={self.tp}; choose one that does (attention TP is tp // dp)"
            )
        if self.num_ranks > MAX_RANKS:
            raise ConfigError("tp", f"tp * pp * cp = {self.num_ranks} ranks; at most {MAX_RANKS} are supported")
        if len(self.layers_per_stage) != self.pp:
            raise ConfigError(
                "layers_per_stage",
                f"{list(self.layers_per_stage)} has {len(self.layers_per_stage)} stages, pp={self.pp}; make them agree",
            )
        if any(n < 1 for n in self.layers_per_stage):
            raise ConfigError(
                "layers_per_stage", f"{list(self.layers_per_stage)} has an empty stage; each needs a layer"
            )
        if self.num_layers > MAX_LAYERS:
            raise ConfigError("layers_per_stage", f"{self.num_layers} layers; at most {MAX_LAYERS} are supported")

    @classmethod
    def with_layers(
        cls, layers: int, *, tp: int = 1, pp: int = 1, cp: int = 1, dp: int = 1, cp_split: ContextSplit = ContextSplit()
    ) -> Topology:
        """Spread `layers` over `pp` stages as evenly as can be, the rest to the first ones."""
        if pp < 1 or layers < pp:
            raise ConfigError("pp", f"{pp} stages need at least one layer each; the model has {layers}")
        stages = tuple(layers // pp + (stage < layers % pp) for stage in range(pp))
        return cls(tp=tp, pp=pp, cp=cp, dp=dp, layers_per_stage=stages, cp_split=cp_split)

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def num_layers(self) -> int:
        return sum(self.layers_per_stage)

    @property
    def attention_tp(self) -> int:
        """Ranks over which the heads of one replica are sharded."""
        return self.tp // self.dp

    def rank(self, stage: int, context: int, tensor: int) -> int:
        """The one definition of rank order."""
        return (stage * self.cp + context) * self.tp + tensor

    def place(self, rank: int) -> tuple[int, int, int]:
        """(stage, context, tensor) of `rank`; the inverse of `rank()`."""
        self.check_rank(rank)
        return rank // (self.cp * self.tp), rank // self.tp % self.cp, rank % self.tp

    def replica_of(self, rank: int) -> int:
        return self.place(rank)[2] // self.attention_tp

    def attention_rank(self, rank: int) -> int:
        """Place of `rank` inside its replica's attention TP group."""
        return self.place(rank)[2] % self.attention_tp

    def replica_ranks(self, replica: int) -> tuple[int, ...]:
        """All ranks of one attention-DP replica, ascending."""
        self.check_replica(replica)
        first = replica * self.attention_tp
        return tuple(
            self.rank(stage, context, tensor)
            for stage in range(self.pp)
            for context in range(self.cp)
            for tensor in range(first, first + self.attention_tp)
        )

    def stage_layers(self, stage: int) -> Interval:
        """Global layers of a stage: prefix sums."""
        ends = list(accumulate(self.layers_per_stage))
        return Interval(ends[stage] - self.layers_per_stage[stage], ends[stage])

    def owned(self, ranks: Sequence[int]) -> tuple[Owned, ...]:
        """(replica, rank) of each of `ranks`."""
        return tuple(Owned(self.replica_of(rank), rank) for rank in ranks)

    def check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.num_ranks:
            raise ConfigError("rank", f"{rank} is outside 0..{self.num_ranks - 1}")

    def check_replica(self, replica: int) -> None:
        if not 0 <= replica < self.dp:
            raise ConfigError("replica", f"{replica} is outside 0..{self.dp - 1} (dp={self.dp})")


@dataclass(frozen=True, slots=True)
class Component:
    """One kind of cache that a model keeps: data, scales, an indexer, a sliding-window group, a recurrent state.

    Attributes:
        name: unique inside the model.
        layers: global layer ids that have this component, ascending. Positions in this tuple are the layer numbers
            that moves, boxes and layouts of the component use.
        kv_heads: the model's total K (never a rank's share times TP). 1 with `replicated` for a latent (MLA).
        kv_factor: 2 for K and V, 1 for a latent or a state.
        row_bytes: contiguous bytes of one head of one token.
        dtype: a name that both sides must share; bytes are moved, never converted.
        replicated: every attention rank holds the whole (MLA latent). Otherwise heads are sharded.
        has_tokens: False for a recurrent state, which has one entry a request instead of one a token.
        scale_mode: how quantised data is scaled, "" for none; both sides must agree.
        opaque_page_tokens: 0, or the tokens of a page whose interior only its back-end understands. Such a page is one
            row, moves whole, and needs equal geometry on both sides: `kv_heads` is the attention TP, `kv_factor` 1,
            `row_bytes` one rank's page. Its ranges and page tables count pages.
    """

    name: str
    layers: tuple[int, ...]
    kv_heads: int
    kv_factor: int
    row_bytes: int
    dtype: str = "bfloat16"
    replicated: bool = False
    has_tokens: bool = True
    scale_mode: str = ""
    opaque_page_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ConfigError(
                f"component {self.name}: layers", "must be ascending layer ids without repetition, at least one"
            )
        for name in ("kv_heads", "kv_factor", "row_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"component {self.name}: {name}", f"{getattr(self, name)} is not positive")
        if self.kv_heads > MAX_KV_HEADS:
            raise ConfigError(
                f"component {self.name}: kv_heads", f"{self.kv_heads}; at most {MAX_KV_HEADS} are supported"
            )
        if self.opaque_page_tokens < 0 or (self.opaque_page_tokens and (self.kv_factor != 1 or not self.has_tokens)):
            raise ConfigError(
                f"component {self.name}: opaque_page_tokens",
                f"{self.opaque_page_tokens}; an opaque page has kv_factor 1 and a token axis",
            )
        if self.replicated and self.kv_heads != 1:
            raise ConfigError(
                f"component {self.name}: kv_heads", f"{self.kv_heads}; a replicated latent counts as one head"
            )

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of one token in one layer, all heads, K and V."""
        return self.kv_factor * self.kv_heads * self.row_bytes

    def check_attention_tp(self, attention_tp: int) -> None:
        """Heads must divide over the ranks or the ranks over the heads.

        Raises:
            ConfigError: neither divides the other.
        """
        if self.kv_heads % attention_tp and attention_tp % self.kv_heads:
            raise ConfigError(
                "kv_heads",
                f"K={self.kv_heads} neither divides nor is divided by attention TP {attention_tp}; change tp or dp",
            )

    def heads_of(self, attention_rank: int, attention_tp: int) -> Interval:
        """Head interval of attention rank r of t: `[r*K/t, (r+1)*K/t)`, or head `floor(r*K/t)` where t > K."""
        self.check_attention_tp(attention_tp)
        first = attention_rank * self.kv_heads // attention_tp
        return Interval(first, first + max(1, self.kv_heads // attention_tp))

    def units(self, tokens: Interval, last: bool) -> Interval:
        """A token range in what this component counts: tokens, whole opaque pages, or its one entry.

        Args:
            last: the range reaches the end of the request, so that a page it ends in is complete.
        """
        if not self.has_tokens:
            return Interval(0, 1) if last else Interval(0, 0)
        if not self.opaque_page_tokens:
            return tokens
        start = tokens.start // self.opaque_page_tokens
        end = -(-tokens.end // self.opaque_page_tokens) if last else tokens.end // self.opaque_page_tokens
        return Interval(start, max(start, end))

    def holders_of_a_head(self, attention_tp: int) -> int:
        """How many ranks of an attention TP group have the same head."""
        return attention_tp if self.replicated else max(1, attention_tp // self.kv_heads)

    def layers_within(self, layers: Interval) -> Interval:
        """Positions in `self.layers` whose global ids fall into `layers`."""
        return Interval(bisect_left(self.layers, layers.start), bisect_left(self.layers, layers.end))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What is cached: a tuple of components, and a fingerprint of everything that makes KV bytes exchangeable.

    Attributes:
        fingerprint: chosen by the engine; covers the weights, rope and its scaling. Both sides must have the same.
    """

    components: tuple[Component, ...]
    fingerprint: str = ""

    def __post_init__(self) -> None:
        names = [component.name for component in self.components]
        if not names or len(set(names)) != len(names):
            raise ConfigError("components", f"{names}: at least one, each with a name of its own")

    @classmethod
    def gqa(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        itemsize: int = 2,
        dtype: str = "bfloat16",
        fingerprint: str = "",
    ) -> ModelSpec:
        """Grouped-query (or multi-head, multi-query) attention: K and V rows of `head_dim * itemsize` bytes."""
        kv = Component("kv", tuple(range(layers)), kv_heads, 2, head_dim * itemsize, dtype)
        return cls((kv,), fingerprint)

    @classmethod
    def mla(
        cls, *, layers: int, latent_dim: int = 576, itemsize: int = 2, dtype: str = "bfloat16", fingerprint: str = ""
    ) -> ModelSpec:
        """Multi-head latent attention: one latent row a token, the same on every attention rank."""
        kv = Component("kv", tuple(range(layers)), 1, 1, latent_dim * itemsize, dtype, replicated=True)
        return cls((kv,), fingerprint)

    def component(self, name: str) -> Component:
        for component in self.components:
            if component.name == name:
                return component
        raise ConfigError("component", f"the model has no {name!r}; it has {[c.name for c in self.components]}")

    def check_topology(self, topology: Topology) -> None:
        """Raises ConfigError where `topology` cannot hold this model."""
        last = max(component.layers[-1] for component in self.components)
        if last >= topology.num_layers:
            raise ConfigError(
                "layers_per_stage", f"the stages hold {topology.num_layers} layers, the model has layer {last}"
            )
        for component in self.components:
            component.check_attention_tp(topology.attention_tp)
