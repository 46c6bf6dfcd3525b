"""The short notation for one engine on the command line: `tp=4,dp=2,pp=2,layers=15+13,page=16,layout=nhd`.

`tp` counts all ranks of a stage and context, `dp` the attention-DP replicas inside them, as everywhere in rdma-kv.
A side that is given says its parallel layout anew: `dp` alone means `tp` = `dp`, `tp` alone means `dp` = 1, and `pp` and
`cp` are 1 unless given (`pp` follows `layers` where only that is given). `page` and `layout` keep their defaults.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches

from rdma_kv.errors import ConfigError
from rdma_kv.topology import MAX_LAYERS, MAX_RANKS, Topology

PARALLEL_KEYS = ("tp", "dp", "pp", "cp", "layers")
ALL_KEYS = (*PARALLEL_KEYS, "page", "layout")
LAYOUTS = ("nhd", "hnd", "lightllm", "sglang", "trtllm", "mla")
MAX_PAGE_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Side:
    """One engine as the notation says it.

    Attributes:
        layers: layers of each pipeline stage; None spreads the model's evenly, the rest to the first stages.
        page: tokens a page.
        layout: a name out of `LAYOUTS`.
        option: where it was said (such as `--prefill`), for errors.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    cp: int = 1
    layers: tuple[int, ...] | None = None
    page: int = 16
    layout: str = "nhd"
    option: str = ""

    def topology(self, model_layers: int) -> Topology:
        """The topology for a model of `model_layers` layers.

        Raises:
            ConfigError: as `Topology`, and where the stages do not sum to `model_layers`; `field` is option and key.
        """
        try:
            return self._topology(model_layers)
        except ConfigError as error:
            key = "layers" if error.field == "layers_per_stage" else error.field
            raise ConfigError(f"{self.option} {key}".strip(), error.problem) from error

    def _topology(self, model_layers: int) -> Topology:
        if self.layers is None:
            return Topology.with_layers(model_layers, tp=self.tp, pp=self.pp, cp=self.cp, dp=self.dp)
        if sum(self.layers) != model_layers:
            stages = "+".join(map(str, self.layers))
            raise ConfigError(
                "layers", f"{stages} is {sum(self.layers)}, the model has {model_layers}; make them equal"
            )
        return Topology(tp=self.tp, pp=self.pp, cp=self.cp, dp=self.dp, layers_per_stage=self.layers)


def parse_side(
    option: str, text: str, defaults: Side, *, keys: Collection[str] = ALL_KEYS, layouts: Collection[str] = LAYOUTS
) -> Side:
    """Parse what `option` (such as `--prefill`) was given.

    Args:
        defaults: where `page` and `layout` come from when the text leaves them out.
        keys: those that the command has a use for; others are refused.
        layouts: names that `layout` may have.

    Raises:
        ConfigError: an unknown, repeated or empty key, or a value that is not what its key needs; `field` is the option
            and the key.
    """
    given = _split(option, text, keys)
    numbers = {
        key: _number(f"{option} {key}", given[key], MAX_RANKS) for key in ("tp", "dp", "pp", "cp") if key in given
    }
    stages = _stages(f"{option} layers", given["layers"]) if "layers" in given else None
    dp = numbers.get("dp", 1)
    return Side(
        tp=numbers.get("tp", dp),
        dp=dp,
        pp=numbers.get("pp", len(stages) if stages else 1),
        cp=numbers.get("cp", 1),
        layers=stages,
        page=_number(f"{option} page", given["page"], MAX_PAGE_TOKENS) if "page" in given else defaults.page,
        layout=_choice(f"{option} layout", given["layout"], layouts) if "layout" in given else defaults.layout,
        option=option,
    )


def _split(option: str, text: str, keys: Collection[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value:
            raise ConfigError(option, f"{item.strip()!r} is not KEY=VALUE; write it like tp=4,dp=2")
        _choice(option, key, keys, "key ")
        if key in given:
            raise ConfigError(f"{option} {key}", "is given twice; keep one")
        given[key] = value
    return given


def _choice(field: str, value: str, choices: Collection[str], kind: str = "") -> str:
    if value in choices:
        return value
    near = get_close_matches(value, choices, n=1)
    hint = f"did you mean {near[0]}? Known: " if near else "use "
    raise ConfigError(field, f"unknown {kind}{value!r}; {hint}{', '.join(choices)}")


def _number(field: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise ConfigError(field, f"{text!r} is not a whole number from 1 to {most}")
    return int(text)


def _stages(field: str, text: str) -> tuple[int, ...]:
    return tuple(_number(field, stage.strip(), MAX_LAYERS) for stage in text.split("+"))
