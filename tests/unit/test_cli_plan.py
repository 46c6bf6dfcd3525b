"""`rdma-kv plan` from the outside: what it prints where, and how it refuses."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rdma_kv.cli.main import BAD_INPUT, run
from rdma_kv.cli.sides import PARALLEL_KEYS, Side, parse_side
from rdma_kv.errors import ConfigError
from rdma_kv.topology import Topology

GOLDEN_PATH = Path(__file__).parent.parent / "data" / "routing.json"
GOLDEN = json.loads(GOLDEN_PATH.read_text())["moves"]

Capture = pytest.CaptureFixture[str]


def plan(*options: str) -> int:
    return run(["plan", *options])


def answer(capsys: Capture, *options: str) -> object:
    """The JSON that a plan prints: one line, and nothing else anywhere."""
    assert plan(*options, "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.endswith("\n")
    assert out.count("\n") == 1
    return json.loads(out)


def complaint(capsys: Capture, *options: str) -> str:
    """The one line with which bad input is refused."""
    assert plan(*options) == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert err.startswith("rdma-kv plan: ")
    return err.removeprefix("rdma-kv plan: ").strip()


def written(tmp_path: Path, content: object) -> str:
    path = tmp_path / "case.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def case(name: str = "gqa4_pp4_uneven_to_tp2pp2") -> dict:
    return copy.deepcopy(next(c for c in GOLDEN if c["name"] == name))


# --- options -----------------------------------------------------------------------------------------------------------


def test_all_pairs_by_default(capsys: Capture):
    found = answer(capsys, "--prefill", "tp=4", "--decode", "dp=8", "--layers", "61", "--mla")
    assert [(move["src"], move["dst"]) for move in found["moves"]] == [
        (src, dst) for src in range(4) for dst in (src, src + 4)
    ]


def test_one_pair(capsys: Capture):
    sides = ("--prefill", "tp=4,dp=2", "--decode", "tp=8,dp=2", "--layers", "28", "--kv-heads", "4")
    found = answer(capsys, *sides, "--prefill-dp", "1", "--decode-dp", "0")
    golden = next(c for c in GOLDEN if c["name"] == "gqa4_tp4dp2_to_tp8dp2" and c["decode_dp"] == 0)
    assert found == {"moves": golden["moves"]}


def test_uneven_stages(capsys: Capture):
    sides = ("--prefill", "pp=4,layers=3+3+2+2", "--decode", "tp=2,pp=2", "--layers", "10", "--kv-heads", "4")
    assert answer(capsys, *sides) == {"moves": case()["moves"]}


def test_the_table_says_who_sends_what(capsys: Capture):
    assert plan("--prefill", "tp=8", "--decode", "tp=4", "--layers", "32", "--kv-heads", "2") == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["0", "0", "0", "0", "[0,32)", "[0,1)"],
        ["0", "2", "0", "1", "[0,32)", "[0,1)"],
        ["0", "4", "0", "2", "[0,32)", "[1,2)"],
        ["0", "6", "0", "3", "[0,32)", "[1,2)"],
    ]
    assert "4 of 8 prefill ranks send, 1 move each: 0, 2, 4, 6; idle: 1, 3, 5, 7" in out
    assert "2 KV heads, 32 layers" in out


def test_a_long_table_is_cut_and_says_so(capsys: Capture):
    assert plan("--prefill", "dp=32", "--decode", "dp=32", "--layers", "2", "--mla") == 0
    out, _ = capsys.readouterr()
    assert "and 624 more moves" in out
    assert "32 of 32 prefill ranks send, 32 moves each: 0-31" in out


MODEL = ("--layers", "8", "--kv-heads", "4")

BAD_OPTIONS = [
    ((), "--prefill: is missing"),
    (("--prefill", "tp=2"), "--decode: is missing"),
    (("--prefill", "tp=2", "--decode", "tp=2"), "--layers: is missing"),
    (("--prefill", "tp=2", "--decode", "tp=2", "--layers", "8"), "--kv-heads: is missing"),
    (("--prefill", "tp=2", "--decode", "tp=2", *MODEL, "--mla"), "--kv-heads: 4, but an MLA latent"),
    (("--prefill", "tp=4,dp=3", "--decode", "tp=2", *MODEL), "--prefill dp: 3 does not divide tp=4"),
    (("--prefill", "tp=2", "--decode", "pp=2,layers=3+4", *MODEL), "--decode layers: 3+4 is 7, the model has 8"),
    (("--prefill", "tp=2", "--decode", "pp=3,layers=4+4", *MODEL), "--decode layers: [4, 4] has 2 stages, pp=3"),
    (("--prefill", "pp=9", "--decode", "tp=2", *MODEL), "--prefill pp: 9 stages need"),
    (("--prefill", "tp=3", "--decode", "tp=1", *MODEL), "--kv-heads: K=4 neither divides"),
    (("--prefill", "tp=3", "--decode", "tp=2", "--layers", "8", "--kv-heads", "6"), "--decode tp: attention TP"),
    (("--prefill", "tp=2", "--decode", "tp=2", *MODEL, "--decode-dp", "1"), "--decode-dp: 1 is outside 0..0"),
    (("--prefill", "dp=2", "--decode", "tp=2", *MODEL, "--prefill-dp", "2"), "--prefill-dp: 2 is outside 0..1"),
    (("--prefill", "tp=2", "--decode", "tp=2", *MODEL, "--prefill-dp", "-1"), "--prefill-dp: '-1' is neither"),
    (("--prefill", "tp=2", "--decode", "tp=2", *MODEL, "--decode-dp", "some"), "--decode-dp: 'some' is neither"),
    (("--prefill", "dp=65536", "--decode", "dp=65536", "--layers", "8", "--mla"), "--decode-dp: up to 4294967296"),
    (("--prefill", "tp=2,page=16", "--decode", "tp=2", *MODEL), "--prefill: unknown key 'page'"),
    (("--layers", "many"), "Invalid value for '--layers'"),
    (("--layers", "0"), "Invalid value for '--layers'"),
    (("--layers", "1" + "0" * 30), "Invalid value for '--layers'"),
    (("--prefil", "tp=2"), "No such option: --prefil"),
    (("--layers",), "Option '--layers' requires an argument"),
    (("tp=2",), "Got unexpected extra argument"),
]


@pytest.mark.parametrize(("options", "expected"), BAD_OPTIONS, ids=lambda value: str(value)[:60])
def test_bad_options_are_refused_in_one_line(capsys: Capture, options: tuple[str, ...], expected: str):
    assert complaint(capsys, *options).startswith(expected)


# --- the notation for a side -------------------------------------------------------------------------------------------

DEFAULTS = Side(tp=2, dp=2, page=32, layout="hnd")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tp=4", Side(tp=4, dp=1, page=32, layout="hnd", option="--decode")),
        ("dp=4", Side(tp=4, dp=4, page=32, layout="hnd", option="--decode")),
        ("tp=4,dp=2", Side(tp=4, dp=2, page=32, layout="hnd", option="--decode")),
        (" tp = 4 , pp = 2 ", Side(tp=4, pp=2, page=32, layout="hnd", option="--decode")),
        ("page=8", Side(page=8, layout="hnd", option="--decode")),
        ("layout=nhd,cp=2", Side(cp=2, page=32, layout="nhd", option="--decode")),
        ("layers=3+2", Side(pp=2, layers=(3, 2), page=32, layout="hnd", option="--decode")),
    ],
)
def test_a_side_that_is_given_replaces_the_parallel_layout(text: str, expected: Side):
    assert parse_side("--decode", text, DEFAULTS) == expected


def test_a_side_becomes_a_topology():
    side = parse_side("--decode", "tp=4,dp=2,pp=2", DEFAULTS)
    assert side.topology(5) == Topology(tp=4, dp=2, pp=2, layers_per_stage=(3, 2))
    side = parse_side("--decode", "pp=2,layers=1+4,cp=2", DEFAULTS)
    assert side.topology(5) == Topology(pp=2, cp=2, layers_per_stage=(1, 4))
    with pytest.raises(ConfigError) as refused:
        side.topology(6)
    assert refused.value.field == "--decode layers"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "--decode"),
        (",", "--decode"),
        ("tp", "--decode"),
        ("tp=", "--decode"),
        ("=4", "--decode"),
        ("tp=2,,dp=2", "--decode"),
        ("tp=2;dp=2", "--decode tp"),
        ("TP=2", "--decode"),
        ("tpp=2", "--decode"),
        ("tp=2,tp=2", "--decode tp"),
        ("tp=0", "--decode tp"),
        ("tp=-1", "--decode tp"),
        ("tp=2.0", "--decode tp"),
        ("tp=²", "--decode tp"),
        ("tp=0x10", "--decode tp"),
        ("tp=" + "9" * 5000, "--decode tp"),
        ("dp=1e3", "--decode dp"),
        ("pp=65537", "--decode pp"),
        ("layers=3+", "--decode layers"),
        ("layers=3+0", "--decode layers"),
        ("page=0", "--decode page"),
        ("layout=nhdd", "--decode layout"),
    ],
    ids=lambda value: value[:20],
)
def test_a_bad_side_is_refused_by_field(text: str, field: str):
    with pytest.raises(ConfigError) as refused:
        parse_side("--decode", text, DEFAULTS)
    assert refused.value.field == field


def test_a_key_that_the_command_has_no_use_for_is_refused():
    with pytest.raises(ConfigError) as refused:
        parse_side("--decode", "tp=2,layout=nhd", DEFAULTS, keys=PARALLEL_KEYS)
    assert "layout" in str(refused.value)


# --- files -------------------------------------------------------------------------------------------------------------


def test_the_golden_file_itself(capsys: Capture):
    assert answer(capsys, "--file", str(GOLDEN_PATH)) == [{"moves": c["moves"]} for c in GOLDEN]


def test_one_case(capsys: Capture, tmp_path: Path):
    assert answer(capsys, "--file", written(tmp_path, case())) == {"moves": case()["moves"]}


def test_a_case_without_name_and_known_answer(capsys: Capture, tmp_path: Path):
    bare = {key: value for key, value in case().items() if key not in ("name", "moves")}
    assert answer(capsys, "--file", written(tmp_path, bare)) == {"moves": case()["moves"]}


def test_the_known_answer_is_not_believed(capsys: Capture, tmp_path: Path):
    assert answer(capsys, "--file", written(tmp_path, {**case(), "moves": ["nonsense"]})) == {"moves": case()["moves"]}


@pytest.mark.parametrize("count", [1, 3])
def test_an_array_keeps_its_order(capsys: Capture, tmp_path: Path, count: int):
    some = GOLDEN[-count:]
    assert answer(capsys, "--file", written(tmp_path, some)) == [{"moves": c["moves"]} for c in some]


def test_standard_input(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with Path(written(tmp_path, case())).open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert answer(capsys, "--file", "-") == {"moves": case()["moves"]}


def test_dp_alone_means_the_same_tp(capsys: Capture, tmp_path: Path):
    short = case("mla_dep4_to_dep2")
    for side in ("prefill", "decode"):
        del short[side]["tp"]
    assert answer(capsys, "--file", written(tmp_path, short)) == {"moves": short["moves"]}


def test_a_table_for_each_case(capsys: Capture, tmp_path: Path):
    assert plan("--file", written(tmp_path, GOLDEN[-2:])) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "case 1 gqa2_tp8_to_tp8dp2_holders" in out
    assert "case 2 gqa2_tp8_to_tp8dp2_holders" in out


def test_a_name_cannot_steer_the_terminal(capsys: Capture, tmp_path: Path):
    assert plan("--file", written(tmp_path, {**case(), "name": "a\n\x1b[31m\ud800[b]"})) == 0
    out, _ = capsys.readouterr()
    assert "a \\x1b[31m\\ud800[b]" in out


def put(*path_and_value: object) -> Callable[[dict], None]:
    *path, last, value = path_and_value

    def change(facts: dict) -> None:
        for key in path:
            facts = facts[key]
        facts[last] = value

    return change


def drop(*path: str) -> Callable[[dict], None]:
    *outer, last = path

    def change(facts: dict) -> None:
        for key in outer:
            facts = facts[key]
        del facts[last]

    return change


def misspell(facts: dict) -> None:
    facts["model"]["kv_head"] = facts["model"].pop("kv_heads")


BAD_CASES = [
    (put("prefill", "tp", "1"), "prefill.tp: give a whole number, got str"),
    (put("prefill", "tp", True), "prefill.tp: give a whole number, got bool"),
    (put("prefill", "tp", 1.0), "prefill.tp: give a whole number, got float"),
    (put("prefill", "tp", None), "prefill.tp: give a whole number, got null"),
    (put("prefill", "tp", []), "prefill.tp: give a whole number, got array"),
    (put("prefill", "tp", -1), "prefill.tp: give a whole number >= 1"),
    (put("prefill", "tp", 0), "prefill.tp: give a whole number >= 1"),
    (put("prefill", "tp", 10**30), "prefill.tp: give a whole number <= 65536"),
    (put("decode", "cp", 65536), "decode.tp: tp * pp * cp = 262144 ranks"),
    (put("decode", "tp", 3), "model.kv_heads: K=4 neither divides nor is divided by attention TP 3"),
    (put("decode", "dp", 3), "decode.dp: 3 does not divide tp=2"),
    (put("decode", "dp", 0), "decode.dp: give a whole number >= 1"),
    (put("decode", "layers_per_stage", [5, 4]), "decode.layers_per_stage: [5, 4] is 9 layers, model.layers is 10"),
    (put("prefill", "layers_per_stage", [10]), "prefill.layers_per_stage: [10] has 1 stages, pp=4"),
    (put("prefill", "layers_per_stage", []), "prefill.layers_per_stage: give an array of length >= 1"),
    (put("prefill", "layers_per_stage", [3, 3, 2, "2"]), "prefill.layers_per_stage[3]: give a whole number"),
    (put("prefill", "layers_per_stage", [3, 3, 4, 0]), "prefill.layers_per_stage[3]: give a whole number >= 1"),
    (put("prefill", "layers_per_stage", 10), "prefill.layers_per_stage: give an array, got int"),
    (put("model", "layers", 11), "prefill.layers_per_stage: [3, 3, 2, 2] is 10 layers, model.layers is 11"),
    (put("model", "layers", 1e1), "model.layers: give a whole number, got float"),
    (put("model", "layers", 1 << 40), "model.layers: give a whole number <= 4096"),
    (put("model", "kv_heads", 3), "model.kv_heads: K=3 neither divides"),
    (put("model", "kv_heads", 1 << 40), "model.kv_heads: give a whole number <= 65536"),
    (put("model", "mla", "no"), "model.mla: give true or false, got str"),
    (put("model", "mla", True), "model.kv_heads: 4, but an MLA latent counts as one head"),
    (put("model", "head_dim", 128), "model.head_dim: unknown field"),
    (put("model", 5), "model: give an object, got int"),
    (put("prefill", []), "prefill: give an object, got array"),
    (put("prefill_dp", 1), "prefill_dp: 1 is outside 0..0"),
    (put("decode_dp", -1), "decode_dp: give a whole number >= 0"),
    (put("decode_dp", "all"), "decode_dp: give a whole number, got str"),
    (put("prefill", "tpp", 2), "prefill.tpp: unknown field; did you mean tp?"),
    (put("decode_db", 0), "decode_db: unknown field; did you mean decode_dp?"),
    (put("name", 3), "name: give a text, got int"),
    (misspell, "model.kv_head: unknown field; did you mean kv_heads?"),
    (drop("model"), "model: is missing"),
    (drop("decode"), "decode: is missing"),
    (drop("prefill_dp"), "prefill_dp: is missing"),
    (drop("decode_dp"), "decode_dp: is missing"),
    (drop("model", "kv_heads"), "model.kv_heads: is missing"),
    (drop("model", "mla"), "model.mla: is missing"),
    (drop("prefill", "dp"), "prefill.dp: is missing"),
    (drop("prefill", "layers_per_stage"), "prefill.layers_per_stage: is missing"),
]


@pytest.mark.parametrize(("change", "expected"), BAD_CASES, ids=[expected[:50] for _, expected in BAD_CASES])
def test_a_bad_case_is_refused_by_field(capsys: Capture, tmp_path: Path, change: Callable[[dict], None], expected: str):
    facts = case()
    change(facts)
    path = written(tmp_path, facts)
    assert complaint(capsys, "--file", path, "--json").startswith(expected)
    assert complaint(capsys, "--file", path).startswith(expected)
    path = written(tmp_path, [case(), case(), facts, case()])
    assert complaint(capsys, "--file", path, "--json").startswith(f"case 3: {expected}")
    path = written(tmp_path, {"moves": [case(), facts]})
    assert complaint(capsys, "--file", path, "--json").startswith(f"case 2: {expected}")


def test_attention_tp_3_against_2_is_refused(capsys: Capture, tmp_path: Path):
    facts = case("dp1_identity")
    facts["model"]["kv_heads"] = 6
    facts["prefill"]["tp"], facts["decode"]["tp"] = 3, 2
    assert complaint(capsys, "--file", written(tmp_path, facts)).startswith("decode.tp: attention TP")


def test_a_plan_too_large_to_print_is_refused(capsys: Capture, tmp_path: Path):
    facts = case("dp1_identity")
    facts["prefill"]["cp"] = facts["decode"]["cp"] = 65536
    assert complaint(capsys, "--file", written(tmp_path, facts)).startswith("decode_dp: up to 4294967296 moves")


BAD_FILES = [
    ("", "is not JSON"),
    ("{", "is not JSON"),
    ("NaN", "is not JSON"),
    ('{"model": Infinity}', "is not JSON"),
    ("[" * 100_000, "is not JSON"),
    ("1" * 5000, "is not JSON"),
    ("7", "holds no case"),
    ("null", "holds no case"),
    ('"case"', "holds no case"),
    ("[]", "is empty"),
    ('{"moves": []}', "is empty"),
]


@pytest.mark.parametrize(("content", "expected"), BAD_FILES, ids=lambda value: value[:20])
def test_a_file_without_cases_is_refused(capsys: Capture, tmp_path: Path, content: str, expected: str):
    message = complaint(capsys, "--file", written(tmp_path, content), "--json")
    assert message.startswith("--file: ")
    assert expected in message


def test_other_bad_files_are_refused(capsys: Capture, tmp_path: Path):
    assert complaint(capsys, "--file", str(tmp_path / "none.json")).startswith("--file: cannot read")
    assert complaint(capsys, "--file", str(tmp_path)).startswith("--file: cannot read")
    assert complaint(capsys, "--file", "a\0b").startswith("--file: cannot read")
    assert complaint(capsys, "--file", written(tmp_path, [1])).startswith("case 1: case: give an object, got int")
    assert complaint(capsys, "--file", written(tmp_path, "{}")).startswith("model: is missing")
    (tmp_path / "latin").write_bytes(b'{"model": "\xff"}')
    assert "is not JSON" in complaint(capsys, "--file", str(tmp_path / "latin"))


def test_a_repeated_field_is_refused(capsys: Capture, tmp_path: Path):
    text = json.dumps(case()).replace('"pp": 4', '"pp": 4, "pp": 4')
    assert complaint(capsys, "--file", written(tmp_path, text)).startswith("pp: is given twice")


@pytest.mark.parametrize("option", [("--prefill", "tp=2"), ("--layers", "10"), ("--mla",), ("--decode-dp", "all")])
def test_a_file_goes_with_no_other_option(capsys: Capture, tmp_path: Path, option: tuple[str, ...]):
    message = complaint(capsys, "--file", written(tmp_path, case()), *option)
    assert message.startswith(f"--file: cannot go with {option[0]}")


# --- the program -------------------------------------------------------------------------------------------------------

HEAVY = ("torch", "nixl", "nixl_cu12", "nixl_cu13", "transformers", "triton")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plan", "--help"],
        ["plan", "--prefill", "tp=2", "--decode", "dp=2", "--layers", "4", "--mla", "--json"],
    ],
    ids=["help", "plan_help", "plan"],
)
def test_nothing_heavy_is_imported(arguments: list[str]):
    script = (
        "import sys\n"
        "from rdma_kv.cli.main import run\n"
        f"status = run({arguments!r})\n"
        f"heavy = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "sys.exit(f'imported {heavy}' if heavy else status)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def program(*arguments: str, **how: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rdma_kv.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **how)


def test_the_program_as_a_process(tmp_path: Path):
    good = program("plan", "--file", str(GOLDEN_PATH), "--json")
    assert (good.returncode, good.stderr) == (0, "")
    assert len(json.loads(good.stdout.splitlines()[-1])) == len(GOLDEN)
    bad = program("plan", "--file", written(tmp_path, {**case(), "model": 3}), "--json")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "rdma-kv plan: model: give an object, got int\n"


def test_wrong_usage_of_the_program_is_one_line_too(capsys: Capture):
    for arguments in ([], ["plam"], ["--no-such-option"]):
        assert run(arguments) == BAD_INPUT
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("rdma-kv: ")
        assert err.count("\n") == 1


def test_help_names_the_commands(capsys: Capture):
    assert run(["--help"]) == 0
    out, _ = capsys.readouterr()
    assert "plan" in out
    assert run(["plan", "--help"]) == 0
    out, _ = capsys.readouterr()
    for option in ("--prefill", "--decode", "--layers", "--kv-heads", "--mla", "--file", "--json"):
        assert option in out


def test_a_reader_that_goes_away_is_no_traceback():
    script = (
        "import os, sys\n"
        "reader, writer = os.pipe()\n"
        "os.close(reader)\n"
        "os.dup2(writer, 1)\n"
        "from rdma_kv.cli.main import run\n"
        "sys.exit(run(['plan', '--prefill', 'dp=64', '--decode', 'dp=64', '--layers', '4', '--mla', '--json']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "")
