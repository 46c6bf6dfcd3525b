"""What the documents say is what the code does: examples run, tables match, links lead somewhere."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import re
import shlex
import time
from pathlib import Path

import numpy as np
import pytest

import rdma_kv
from rdma_kv import (
    Agent,
    AgentConfig,
    ErrorCode,
    GpuConfig,
    KvLayout,
    Limits,
    LoopbackNetwork,
    LoopbackTransport,
    ModelSpec,
    RdmaKvError,
    ReplicaId,
    Role,
    StagingConfig,
    StaticRegistry,
    Timeouts,
    Topology,
    parse_registry,
)
from rdma_kv.cli.main import run
from rdma_kv.demo.run import Verdict
from rdma_kv.demo.shapes import SHAPES

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "docker/README.md",
    ROOT / "integration/README.md",
]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def section(text: str, title: str) -> str:
    """What stands under a heading, up to the next one."""
    return text.split(f"{title}\n", 1)[1].split("\n#", 1)[0]


def rows(text: str, *heading: str) -> list[list[str]]:
    """Cells of all tables whose header begins with `heading`."""
    found, inside = [], False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip()[1:-1].split("|")]
        if cells[: len(heading)] == list(heading):
            inside = True
        elif inside and not set(line) <= set("|- "):
            found.append(cells)
    return found


def code(cell: str) -> str:
    """What stands between backquotes, or nothing."""
    match = re.fullmatch("`(.*)`", cell)
    return match[1] if match else ""


# --- README ------------------------------------------------------------------------------------------------------------


def test_the_python_example_runs_as_shown_and_quickly(tmp_path, monkeypatch, capsys):
    (example,) = blocks(read("README.md"), "python")
    monkeypatch.chdir(tmp_path)
    begin = time.process_time()  # not the clock on the wall: other processes of this machine do not count
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    assert time.process_time() - begin < 2.0
    printed = re.search(r"print\(.*\)  # (.*)", example)
    assert capsys.readouterr().out.strip() == printed[1]


def test_the_registry_example_is_read():
    (example,) = blocks(read("README.md"), "toml")
    engines = parse_registry(example.encode())
    assert [agent.ranks for agent in engines["decode"].agents_of(1)] == [(2, 3)]


def test_plan_prints_what_the_readme_shows(capsys):
    commands = [block for block in blocks(read("README.md"), "console") if block.startswith("$ rdma-kv plan")]
    assert len(commands) == 2
    for block in commands:
        command, _, expected = block.partition("\n")
        assert run(shlex.split(command)[2:]) == 0
        assert capsys.readouterr().out.rstrip() == expected.rstrip()


def test_the_shapes_are_those_of_the_demo():
    shown = rows(read("README.md"), "name", "what differs")
    assert shown == [[f"`{s.name}`", s.what, s.model, f"`{s.prefill}`", f"`{s.decode}`"] for s in SHAPES]


def test_the_two_commands_are_shown_and_exist():
    shown = {block.strip().removeprefix("$ make ") for block in blocks(read("README.md"), "console") if "make" in block}
    assert shown == {"demo", "test"}
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    assert {"demo", "test", "check", "install"} <= targets


def test_every_dependency_is_explained():
    project = re.search(r"\ndependencies = \[(.*?)\]", read("pyproject.toml"), re.DOTALL)
    names = set(re.findall(r'"([A-Za-z_0-9-]+)', project[1]))
    explained = {cells[0] for cells in rows(read("README.md"), "package", "why")}
    assert explained == names
    extras = set(
        re.findall(
            r"^([a-z0-9-]+) = \[", read("pyproject.toml").split("[project.optional-dependencies]")[1], re.MULTILINE
        )
    )
    extras &= {"nixl", "nixl-cu13", "ucx", "demo", "gpu", "dev"}
    assert {code(cells[0]) for cells in rows(read("README.md"), "extra")} == extras


# --- errors.md ---------------------------------------------------------------------------------------------------------


def error_classes() -> set[type[RdmaKvError]]:
    found, left = {RdmaKvError}, [RdmaKvError]
    while left:
        children = left.pop().__subclasses__()
        found |= set(children)
        left += children
    return {kind for kind in found if kind.__module__ == "rdma_kv.errors"}


def test_every_error_class_and_code_is_listed_truly():
    listed = {code(cells[0]): cells for cells in rows(read("docs/errors.md"), "class", "code")}
    assert set(listed) == {kind.__name__ for kind in error_classes()}
    codes = {}
    for kind in error_classes():
        _, number, retryable, *_ = listed[kind.__name__]
        assert retryable == ("yes" if kind.retryable else "no"), kind
        if number:
            assert number == f"{kind.code.value} `{kind.code.name}`", kind
            codes[kind.code] = kind
        else:
            assert "code" not in vars(kind) or kind is RdmaKvError
    assert set(codes) == set(ErrorCode)


MODEL = ModelSpec.gqa(layers=2, kv_heads=4, head_dim=64, dtype="float16", fingerprint="my-model-v1")
TWO_LAYERS = (2,)
REGISTRY = """
cluster = "default"
[[engine]]
name = "p"
role = "prefill"
topology = {{ layers_per_stage = [2] }}
agent = [{{ address = "{}:{}", ranks = [0] }}]
[[engine]]
name = "d"
role = "decode"
topology = {{ tp = 2, layers_per_stage = [2] }}
agent = [{{ address = "{}:{}", ranks = [0, 1] }}]
"""


@contextlib.asynccontextmanager
async def surroundings(folder: Path):
    """The names that the rows of errors.md use."""
    network, registry = LoopbackNetwork(), StaticRegistry(folder / "cluster.toml")

    def loopback(name: str) -> LoopbackTransport:
        return LoopbackTransport(network, name)

    one, two = (Topology(tp=tp, layers_per_stage=TWO_LAYERS) for tp in (1, 2))
    p_config = AgentConfig("p", Role.PREFILL, (0,), one, MODEL)
    nhd = KvLayout.nhd(layers=2, pages=8, page_size=16, heads=4, row_bytes=128)
    hnd = KvLayout.hnd(layers=2, pages=8, page_size=32, heads=2, row_bytes=128)
    src = np.zeros((2, 2, 8, 16, 4, 64), np.float16)
    dst = [np.zeros((2, 2, 8, 2, 32, 64), np.float16) for _ in range(2)]
    network_transport, region = loopback("spare"), np.zeros(64, np.uint8)
    async with (
        Agent(p_config, registry, transport=loopback) as prefill,
        Agent(AgentConfig("d", Role.DECODE, (0, 1), two, MODEL), registry, transport=loopback) as decode,
        Agent(AgentConfig("fresh", Role.PREFILL, (0,), one, MODEL), registry, transport=loopback) as fresh,
        Agent(AgentConfig("pair", Role.DECODE, (0, 1), two, MODEL), registry, transport=loopback) as pair,
    ):
        (folder / "cluster.toml").write_text(REGISTRY.format(*prefill.address, *decode.address))
        prefill.register_pool(nhd, src, replica=0, rank=0)
        for rank in range(2):
            decode.register_pool(hnd, dst[rank], replica=0, rank=rank)
        async with Agent(AgentConfig("closed", Role.PREFILL, (0,), one, MODEL), registry, transport=loopback) as closed:
            pass
        await network_transport.start()
        address = region.ctypes.data
        await network_transport.register(address, 16)
        host, port = prefill.address
        taken = dataclasses.replace(p_config, listen=f"{host}:{port}")
        try:
            yield (
                {name: getattr(rdma_kv, name) for name in rdma_kv.__all__}
                | {"MODEL": MODEL, "REGISTRY": blocks(read("README.md"), "toml")[0].encode()}
                | locals()
            )
        finally:
            await network_transport.close()


async def outcome_of(statement: str, names: dict) -> Exception | None:
    """Run one row's statement, in which `await` is allowed."""
    scope = dict(names)
    exec(compile(f"async def mistake():\n    {statement}", "errors.md", "exec"), scope)
    try:
        await scope["mistake"]()
    except RdmaKvError as error:
        return error
    return None


def check_row(error: Exception | None, kind: str, field: str) -> None:
    assert type(error).__name__ == code(kind), repr(error)
    assert getattr(error, "field", "") == code(field), repr(error)


BLOCK = """async with prefill.send("req-1", 0, [5, 2, 7], to=ReplicaId("d", 0), tokens=40) as out:
        {}"""
INSIDE = section(read("docs/errors.md"), "### Inside the block of a send")
IN_CALLS = rows(read("docs/errors.md").replace(INSIDE, ""), "written")
IN_BLOCK = rows(INSIDE, "written")


def test_the_tables_of_mistakes_are_found():
    assert BLOCK.splitlines()[0] in INSIDE
    assert len(IN_BLOCK) >= 9
    assert len(IN_CALLS) >= 50


async def test_each_mistake_in_a_call_gets_what_errors_md_says(tmp_path):
    async with surroundings(tmp_path) as names:
        for written, kind, field, _ in IN_CALLS:
            check_row(await outcome_of(code(written), names), kind, field)
        for agent in (names["prefill"], names["decode"]):
            assert agent.stats()["slots_free"] == agent.stats()["slots_total"]


@pytest.mark.parametrize(("written", "kind", "field"), [cells[:3] for cells in IN_BLOCK])
async def test_each_mistake_inside_a_send_fails_both_sides(tmp_path, written, kind, field):
    async with surroundings(tmp_path) as names:
        receive = names["decode"].receive("req-1", 0, [3, 6], source=ReplicaId("p", 0), tokens=40, timeout_s=10)
        receiving = asyncio.create_task(receive)
        check_row(await outcome_of(BLOCK.format(code(written)), names), kind, field)
        with pytest.raises(RdmaKvError):
            await receiving


# --- operations.md -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AgentConfig, StagingConfig, GpuConfig, Timeouts, Limits])
def test_every_setting_is_listed_with_its_default(kind):
    text = section(read("docs/operations.md"), f"### `{kind.__name__}`")
    listed = {code(cells[0]): cells[1] for cells in rows(text, "setting", "default")}
    assert set(listed) == {field.name for field in dataclasses.fields(kind)}
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING:
            assert listed[field.name] == ""
        elif isinstance(field.default, bool):
            assert code(listed[field.name]) == str(field.default), field.name
        elif isinstance(field.default, (int, float)):
            assert float(code(listed[field.name]).replace(",", "")) == field.default, field.name
        elif isinstance(field.default, str):
            assert code(listed[field.name]).strip('"') == field.default, field.name


def test_every_field_of_stats_is_explained(tmp_path):
    config = AgentConfig("p", Role.PREFILL, (0,), Topology(layers_per_stage=TWO_LAYERS), MODEL)
    network = LoopbackNetwork()
    agent = Agent(config, StaticRegistry(tmp_path / "none"), transport=lambda name: LoopbackTransport(network, name))
    listed = {code(cells[0]) for cells in rows(read("docs/operations.md"), "field", "meaning")}
    assert listed == set(agent.stats())


def test_every_counter_is_explained():
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "rdma_kv").glob("*.py"))
    counted = set(re.findall(r'counters\["([a-z_]+)"\]', source))
    assert counted == {code(cells[0]) for cells in rows(read("docs/operations.md"), "counter", "meaning")}


def test_every_key_of_the_demos_object_is_explained():
    text = section(read("docs/operations.md"), "## Exit statuses and output of the commands")
    listed = {code(cells[0]) for cells in rows(text, "key", "meaning")}
    assert listed == set(Verdict(requests=1).as_json())


# --- the rest ----------------------------------------------------------------------------------------------------------


def script(name: str):
    """A program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_state_diagrams_are_up_to_date():
    drawn = script("render_states").render_states()
    assert read("docs/states.md") == drawn, "run: .venv/bin/python docs/render_states.py"


def test_tables_of_figures_are_up_to_date():
    render = script("render_performance")
    between = read("docs/performance.md").partition(render.BEGIN)[2].partition(render.END)[0]
    assert between.strip() == render.rendered().strip(), "run: .venv/bin/python docs/render_performance.py"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        linked = (path.parent / name) if name else path
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}, target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_modules_that_are_named_exist(path):
    for name in re.findall(
        r"`((?:rdma_kv|kernels|tests|docs|docker|integration)/[\w./-]*)`", path.read_text(encoding="utf-8")
    ):
        assert (ROOT / name).exists(), name


def test_the_changelog_knows_this_version():
    assert f"[{rdma_kv.__version__}]" in read("CHANGELOG.md")
