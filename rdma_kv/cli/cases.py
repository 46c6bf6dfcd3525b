"""Case files of `rdma-kv plan`, in the form of the golden routing file.

A case is an object with `model`, `prefill`, `decode`, `prefill_dp` and `decode_dp`; its own `name` is shown, its own
`moves` (the known answer) are passed over. A file holds one case, an array of them, or an object whose `moves` is such
an array. Everything is typed and no field is guessed, but for one: where a side gives `dp` alone, `tp` is the same.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from rdma_kv.errors import ConfigError
from rdma_kv.topology import MAX_KV_HEADS, MAX_LAYERS, MAX_RANKS

Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
Replica = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]


class CaseModel(Struct, frozen=True, forbid_unknown_fields=True):
    """What routing needs to know of a model."""

    kv_heads: Annotated[int, Meta(ge=1, le=MAX_KV_HEADS)]
    mla: bool
    layers: Layers


class CaseSide(Struct, frozen=True, forbid_unknown_fields=True):
    """One engine of a case."""

    pp: Ranks
    cp: Ranks
    dp: Ranks
    layers_per_stage: Annotated[tuple[Layers, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    tp: Ranks | UnsetType = UNSET


class Case(Struct, frozen=True, forbid_unknown_fields=True):
    """One question to the planner."""

    model: CaseModel
    prefill: CaseSide
    decode: CaseSide
    prefill_dp: Replica
    decode_dp: Replica
    name: str = ""
    moves: object = None


class CaseFile(NamedTuple):
    """The cases of a file, in order. `single`: it held one case, not an array."""

    cases: list[Case]
    single: bool


def read_cases(path: str) -> CaseFile:
    """Read `path` (`-` is standard input).

    Raises:
        ConfigError: `field` names the field, and before it the case (counted from 1) where the file has an array.
    """
    content = _parse(path, _read(path))
    if isinstance(content, dict) and not (isinstance(content.get("moves"), list) and _CASE_FIELDS.isdisjoint(content)):
        return CaseFile([_case(content)], single=True)
    entries = content["moves"] if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise ConfigError("--file", f"{path} holds no case, no array of cases and no object with an array `moves`")
    if not entries:
        raise ConfigError("--file", f"the array of cases in {path} is empty; put at least one case in")
    cases = []
    for number, entry in enumerate(entries, 1):
        with case_number(number):
            cases.append(_case(entry))
    return CaseFile(cases, single=False)


@contextmanager
def case_number(number: int) -> Iterator[None]:
    """Puts the case before the field of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"case {number}: {error.field}", error.problem) from error


def _read(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError("--file", f"cannot read {path}: {reason}; give a readable file of cases") from error


def _parse(path: str, content: bytes) -> object:
    """JSON to plain values. Python's own parser, because a repeated key must not pass for the last one."""
    try:
        parsed: object = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise ConfigError("--file", f"{path} is not JSON: {error}") from error
    return parsed


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(key, "is given twice in one object; keep one")
        found[key] = value
    return found


def _not_json(word: str) -> None:
    raise ValueError(f"{word} is no JSON value")


def _case(entry: object) -> Case:
    try:
        return msgspec.convert(entry, Case)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error


_CASE_FIELDS = frozenset(Case.__struct_fields__) - {"name", "moves"}
_KNOWN_FIELDS = {"": Case.__struct_fields__, "model": CaseModel.__struct_fields__}
_PLAIN_WORDS = {
    "Expected int": "give a whole number",
    "Expected bool": "give true or false",
    "Expected str": "give a text",
    "Expected array": "give an array",
    "Expected object": "give an object",
}


def _named(text: str) -> ConfigError:
    """msgspec's complaint as a ConfigError: the path becomes the field, the rest says what to do."""
    problem, _, path = text.partition(" - at `$")
    parent = path.rstrip("`").lstrip(".")
    problem = problem.replace("`", "")
    if match := re.fullmatch(r"Object missing required field (.*)", problem):
        return ConfigError(_join(parent, match[1]), "is missing; add it")
    if match := re.fullmatch(r"Object contains unknown field (.*)", problem, re.DOTALL):
        known = _KNOWN_FIELDS.get(parent, CaseSide.__struct_fields__)
        near = get_close_matches(match[1], known, n=1)
        hint = f"did you mean {near[0]}?" if near else "take it out."
        return ConfigError(_join(parent, match[1]), f"unknown field; {hint} Known: {', '.join(known)}")
    for theirs, ours in _PLAIN_WORDS.items():
        problem = problem.replace(theirs, ours)
    return ConfigError(parent or "case", problem)


def _join(parent: str, field: str) -> str:
    return f"{parent}.{field}" if parent else field
