"""`rdma-kv plan`: two topologies and a model in, who sends what to whom out. It needs no engine and moves nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from rdma_kv.cli.cases import Case, CaseSide, case_number, read_cases
from rdma_kv.cli.output import console, print_json, printable
from rdma_kv.cli.sides import PARALLEL_KEYS, Side, parse_side
from rdma_kv.errors import ConfigError
from rdma_kv.planner import Move, Route, check_pair
from rdma_kv.topology import MAX_KV_HEADS, MAX_LAYERS, ModelSpec, Topology

if TYPE_CHECKING:
    from rich.table import Table

MAX_MOVES = 1 << 21  # more than all pairs of two DEP engines of 1,024 ranks; a few seconds and under 2 GiB
MAX_TABLE_ROWS = 400  # beyond this nobody reads a table


class Fields(NamedTuple):
    """What the input calls the things that only both sides together can get wrong."""

    kv_heads: str
    tp: str
    prefill_dp: str
    decode_dp: str


FILE_FIELDS = Fields("model.kv_heads", "decode.tp", "prefill_dp", "decode_dp")
OPTION_FIELDS = Fields("--kv-heads", "--decode tp", "--prefill-dp", "--decode-dp")


class Options(NamedTuple):
    """What the command line says when there is no file."""

    prefill: str | None
    decode: str | None
    layers: int | None
    kv_heads: int | None
    mla: bool
    prefill_dp: str | None
    decode_dp: str | None


@dataclass(frozen=True, slots=True)
class Question:
    """What one plan is asked for: the moves of every pair out of `prefill_dp` x `decode_dp` replicas."""

    model: ModelSpec
    prefill: Topology
    decode: Topology
    prefill_dp: range
    decode_dp: range
    name: str = ""

    @property
    def most_moves(self) -> int:
        """No fewer than the plan has, without making it."""
        spans = max(self.prefill.attention_tp, self.decode.attention_tp)
        stages = self.prefill.pp + self.decode.pp - 1
        contexts = self.prefill.cp * self.decode.cp
        return len(self.prefill_dp) * len(self.decode_dp) * spans * stages * contexts

    def moves(self) -> list[Move]:
        """Sorted by source, destination, layers and heads. The ranks of a move tell its replicas."""
        pairs = product(self.prefill_dp, self.decode_dp)
        return sorted(m for p, d in pairs for m in Route(self.model, self.prefill, self.decode, p, d).moves)


def plan(
    *,
    prefill: Annotated[str | None, typer.Option(help="Prefill engine, such as tp=4,dp=2,pp=2,layers=15+13.")] = None,
    decode: Annotated[str | None, typer.Option(help="Decode engine; dp alone means tp=dp, tp alone dp=1.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, max=MAX_LAYERS, help="Layers of the model.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, max=MAX_KV_HEADS, help="KV heads of the whole model, not of a rank.")
    ] = None,
    mla: Annotated[bool, typer.Option("--mla", help="One latent on every attention rank, in place of heads.")] = False,
    prefill_dp: Annotated[
        str | None, typer.Option(metavar="all|N", help="Prefill replica; all of them by default.")
    ] = None,
    decode_dp: Annotated[
        str | None, typer.Option(metavar="all|N", help="Decode replica; all of them by default.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="JSON: a case, an array of cases, or an object with such `moves`; - is stdin."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on standard output.")] = False,
) -> None:
    """Show which rank sends which layers and KV heads to which rank."""
    options = Options(prefill, decode, layers, kv_heads, mla, prefill_dp, decode_dp)
    if file is None:
        _answer([_from_options(options)], single=True, as_json=as_json)
        return
    if both := [name for name, value in options._asdict().items() if value not in (None, False)]:
        raise ConfigError("--file", f"cannot go with --{both[0].replace('_', '-')}; a case says that in the file")
    cases, single = read_cases(file)
    _answer([_from_case(cases[0])] if single else _from_cases(cases), single=single, as_json=as_json)


# --- questions ---------------------------------------------------------------------------------------------------------


def _from_options(options: Options) -> Question:
    if options.prefill is None:
        raise ConfigError("--prefill", "is missing; give it like --prefill tp=4, or a case with --file")
    if options.decode is None:
        raise ConfigError("--decode", "is missing; give it like --decode tp=4, or a case with --file")
    if options.layers is None:
        raise ConfigError("--layers", "is missing; give the model's number of layers")
    if options.kv_heads is None and not options.mla:
        raise ConfigError("--kv-heads", "is missing; give the model's KV heads, or --mla")
    prefill = parse_side("--prefill", options.prefill, Side(), keys=PARALLEL_KEYS).topology(options.layers)
    decode = parse_side("--decode", options.decode, Side(), keys=PARALLEL_KEYS).topology(options.layers)
    question = Question(
        _model(OPTION_FIELDS, options.layers, 1 if options.kv_heads is None else options.kv_heads, options.mla),
        prefill,
        decode,
        _replicas("--prefill-dp", options.prefill_dp, prefill),
        _replicas("--decode-dp", options.decode_dp, decode),
    )
    return _checked(question, OPTION_FIELDS)


def _replicas(field: str, text: str | None, topology: Topology) -> range:
    if text is None or text == "all":
        return range(topology.dp)
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(field, f"{text!r} is neither 'all' nor the number of a replica")
    return range(int(text), int(text) + 1)


def _from_cases(cases: Iterable[Case]) -> list[Question]:
    questions = []
    for number, case in enumerate(cases, 1):
        with case_number(number):
            questions.append(_from_case(case))
    return questions


def _from_case(case: Case) -> Question:
    question = Question(
        _model(FILE_FIELDS, case.model.layers, case.model.kv_heads, case.model.mla),
        _topology("prefill", case.prefill, case.model.layers),
        _topology("decode", case.decode, case.model.layers),
        range(case.prefill_dp, case.prefill_dp + 1),
        range(case.decode_dp, case.decode_dp + 1),
        case.name,
    )
    return _checked(question, FILE_FIELDS)


def _model(fields: Fields, layers: int, kv_heads: int, mla: bool) -> ModelSpec:
    """Routing asks for no row size, so any does."""
    if not mla:
        return ModelSpec.gqa(layers=layers, kv_heads=kv_heads, head_dim=1)
    if kv_heads != 1:
        raise ConfigError(fields.kv_heads, f"{kv_heads}, but an MLA latent counts as one head; make it 1")
    return ModelSpec.mla(layers=layers, latent_dim=1)


def _topology(name: str, side: CaseSide, layers: int) -> Topology:
    stages = side.layers_per_stage
    tp = side.tp if isinstance(side.tp, int) else side.dp
    try:
        topology = Topology(tp=tp, pp=side.pp, cp=side.cp, dp=side.dp, layers_per_stage=stages)
    except ConfigError as error:
        raise ConfigError(f"{name}.{error.field}", error.problem) from error
    if topology.num_layers != layers:
        raise ConfigError(
            f"{name}.layers_per_stage",
            f"{list(stages)} is {topology.num_layers} layers, model.layers is {layers}; make them equal",
        )
    return topology


def _checked(question: Question, fields: Fields) -> Question:
    """`question`, unless model and both sides do not go together.

    Raises:
        ConfigError: its field in the words of `fields`.
    """
    prefill, decode = question.prefill, question.decode
    for side, topology in (("prefill", prefill), ("decode", decode)):
        try:
            question.model.check_topology(topology)
        except ConfigError as error:
            raise ConfigError(fields.kv_heads, f"{error.problem} of {side}") from error
    try:
        check_pair(question.model, prefill, decode)
    except ConfigError as error:
        raise ConfigError(fields.tp if error.field == "tp" else error.field, error.problem) from error
    _check_replicas(fields.prefill_dp, question.prefill_dp, prefill)
    _check_replicas(fields.decode_dp, question.decode_dp, decode)
    if question.most_moves > MAX_MOVES:
        raise ConfigError(
            fields.decode_dp,
            f"up to {question.most_moves} moves, more than {MAX_MOVES}; ask for fewer replicas or smaller engines",
        )
    return question


def _check_replicas(field: str, replicas: range, topology: Topology) -> None:
    if replicas.stop > topology.dp:
        raise ConfigError(field, f"{replicas.stop - 1} is outside 0..{topology.dp - 1}; that side has dp={topology.dp}")


# --- answers -----------------------------------------------------------------------------------------------------------


def _answer(questions: Sequence[Question], *, single: bool, as_json: bool) -> None:
    if as_json:
        objects = [_json_object(question.moves()) for question in questions]
        print_json(objects[0] if single else objects)
        return
    for number, question in enumerate(questions, 1):
        _show(question, question.moves(), "" if single else f"case {number}")


def _json_object(moves: Iterable[Move]) -> dict[str, list[dict[str, object]]]:
    """In the form of the golden routing file."""
    return {
        "moves": [
            {
                "src": move.src,
                "dst": move.dst,
                "layers": (move.layers.start, move.layers.end),
                "heads": (move.heads.start, move.heads.end),
            }
            for move in moves
        ]
    }


def _show(question: Question, moves: Sequence[Move], label: str) -> None:
    lines = [
        printable(" ".join(part for part in (label, question.name) if part)),
        _describe_model(question.model),
        _describe_side("prefill", question.prefill),
        _describe_side("decode", question.decode),
    ]
    out = console()
    out.print("\n".join(filter(None, lines)), soft_wrap=True)
    out.print(_table(question, moves[:MAX_TABLE_ROWS]))
    if len(moves) > MAX_TABLE_ROWS:
        out.print(f"and {len(moves) - MAX_TABLE_ROWS} more moves: choose one replica of each side, or take --json")
    out.print(_describe_senders(question, moves) + "\n", soft_wrap=True)


def _describe_model(model: ModelSpec) -> str:
    (component,) = model.components
    heads = "MLA, one latent" if component.replicated else f"{component.kv_heads} KV heads"
    return f"model   {heads}, {len(component.layers)} layers"


def _describe_side(name: str, topology: Topology) -> str:
    stages = "+".join(map(str, topology.layers_per_stage[:16])) + ("+..." if topology.pp > 16 else "")
    return (
        f"{name:7} tp={topology.tp} dp={topology.dp} pp={topology.pp} cp={topology.cp} layers={stages}: "
        f"{topology.num_ranks} ranks, attention TP {topology.attention_tp}"
    )


def _table(question: Question, moves: Iterable[Move]) -> Table:
    from rich.table import Table

    table = Table()
    for heading in ("prefill dp", "src rank", "decode dp", "dst rank", "layers", "heads"):
        table.add_column(heading, justify="right", no_wrap=True)
    for move in moves:
        src_dp, dst_dp = question.prefill.replica_of(move.src), question.decode.replica_of(move.dst)
        cells = (src_dp, move.src, dst_dp, move.dst, move.layers, move.heads)
        table.add_row(*map(str, cells))
    return table


def _describe_senders(question: Question, moves: Iterable[Move]) -> str:
    """How the work spreads over the prefill ranks that were asked for."""
    load = Counter(move.src for move in moves)
    ranks = sorted(rank for replica in question.prefill_dp for rank in question.prefill.replica_ranks(replica))
    idle = [rank for rank in ranks if rank not in load]
    least, most = min(load.values()), max(load.values())
    each = f"{most} move{'s' if most > 1 else ''}" if least == most else f"{least} to {most} moves"
    tail = f"; idle: {_spans(idle)}" if idle else ""
    return f"{len(load)} of {len(ranks)} prefill ranks send, {each} each: {_spans(sorted(load))}{tail}"


def _spans(ranks: Sequence[int]) -> str:
    """`0-3, 8` for 0, 1, 2, 3, 8."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] + 1 == rank:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
