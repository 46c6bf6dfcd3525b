"""The demo model: reproducible, sensitive to its KV, safe to fork. torch is imported once, by the module's fixture."""

import json
import os
import socket
import subprocess
import sys
import threading
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from rdma_kv.demo.model import DemoModel, ModelShape, warm
from rdma_kv.demo.pools import PageAllocator, RankPool, assemble, cut, pages_for
from rdma_kv.demo.verify import compare, fingerprints, overwrite_page
from rdma_kv.errors import ConfigError, LocalProtocolError
from rdma_kv.topology import Topology
from rdma_kv.types import Interval

COUNT = 16
TASKS = Path("/proc/self/task")


def os_threads():
    return len(list(TASKS.iterdir())) if TASKS.exists() else 0


def refuse(*_args):
    raise AssertionError("the model must not use the network")


@pytest.fixture(scope="module")
def warmed():
    """(the default model, OS and Python threads before, the same after); built with the network refused."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        pytest.skip("needs torch and transformers")
    before = os_threads(), threading.active_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket.socket, "connect_ex", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        model = warm(ModelShape())
    return model, before, (os_threads(), threading.active_count())


@pytest.fixture(scope="module")
def model(warmed):
    return warmed[0]


@pytest.fixture(scope="module")
def models(model):
    """A model for each number of KV heads, with seeds of their own."""
    return {4: model} | {kv_heads: DemoModel(10 + kv_heads, kv_heads=kv_heads) for kv_heads in (1, 2, 8)}


def test_importing_is_cheap():
    code = "import sys, rdma_kv.demo.model, rdma_kv.demo.pools, rdma_kv.demo.verify; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.strip() == b"False"


def test_warming_starts_no_thread(warmed):
    _, before, after = warmed
    assert before == after


def test_forked_child_computes_the_same(model):
    prompt = model.prompts(3, 8)[2]
    wanted = model.undivided(prompt, COUNT)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns about any OS thread; NumPy's BLAS has one, and stops it around a fork by itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            kv, first, _ = model.prefill(prompt)
            inherited = [first, *model.generate(kv, first, COUNT)]
            rebuilt = DemoModel().undivided(prompt, COUNT)
            os.write(writer, json.dumps([inherited, rebuilt, os_threads()]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    inherited, rebuilt, threads = json.loads(answer)
    assert inherited == wanted
    assert rebuilt == wanted
    assert threads == (1 if TASKS.exists() else 0)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_tokens_from_the_kv_alone_equal_the_undivided_run(models, kv_heads):
    model = models[kv_heads]
    distinct = []
    for prompt in model.prompts(5, kv_heads):
        kv, first, extras = model.prefill(prompt)
        assert kv.shape == (4, 2, len(prompt), kv_heads, 32)
        assert kv.dtype == np.float32
        assert np.isfinite(kv).all()
        assert extras["prompt_tokens"] == len(prompt)
        tokens = model.generate(kv, first, COUNT)
        assert [first, *tokens] == model.undivided(prompt, COUNT)
        distinct.append(len(set(tokens)))
    assert np.mean(distinct) >= 10


def test_undivided_run_equals_a_run_without_any_cache(model):
    """Oracle: the whole sequence again for every token, by the model's own forward."""
    torch = model._torch
    for prompt in model.prompts(2, 1):
        tokens = []
        with torch.inference_mode():
            for _ in range(COUNT + 1):
                logits = model._model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))
        assert model.undivided(prompt, COUNT) == tokens


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_any_overwritten_page_changes_the_tokens(models, kv_heads):
    model = models[kv_heads]
    for prompt in model.prompts(3, 20 + kv_heads):
        kv, first, _ = model.prefill(prompt)
        tokens = model.generate(kv, first, COUNT)
        for page_size in (16, 32):
            last = pages_for(len(prompt), page_size) - 1
            for page in {0, last // 2, last}:
                assert model.generate(overwrite_page(kv, page, page_size), first, COUNT) != tokens


@pytest.mark.usefixtures("model")
def test_other_seeds_and_depths_are_sensitive_too():
    for seed, layers in [(101, 4), (102, 4), (103, 2), (104, 10)]:
        model = DemoModel(seed, layers=layers)
        prompt = model.prompts(1, seed)[0]
        kv, first, _ = model.prefill(prompt)
        tokens = model.generate(kv, first, COUNT)
        assert [first, *tokens] == model.undivided(prompt, COUNT)
        assert len(set(tokens)) >= 10
        assert model.generate(overwrite_page(kv, 0, 16), first, COUNT) != tokens


def test_exchanged_pages_keep_the_tokens_but_not_the_bytes(model):
    """Why tokens alone are no proof: attention does not know the order of cached tokens."""
    topology = Topology.with_layers(4)
    component = model.spec().components[0]
    prompt = model.prompts(2, 3)[1]
    kv, first, _ = model.prefill(prompt)
    exchanged = kv.copy()
    exchanged[:, :, :16], exchanged[:, :, 16:32] = kv[:, :, 16:32], kv[:, :, :16]
    assert model.generate(exchanged, first, COUNT) == model.generate(kv, first, COUNT)
    assert len(compare(fingerprints(kv), exchanged, component, topology, 0)) == 4 * 2 * 4


def test_generate_only_reads_its_kv(model):
    kv, first, _ = model.prefill(model.prompts(1, 4)[0])
    kv.setflags(write=False)
    before = kv.tobytes()
    assert model.generate(kv, first, 3) == model.generate(np.asfortranarray(kv), first, 3)
    assert kv.tobytes() == before


def test_tokens_survive_the_pools_of_both_sides(model):
    """The demo without a transfer: cut, paged, read back, joined, decoded, verified."""
    component = model.spec().components[0]
    prefill, decode = Topology.with_layers(4, tp=2), Topology.with_layers(4, tp=4, dp=2)
    pools = {rank: RankPool("nhd", component, prefill, rank, pages=32, page_size=16) for rank in range(2)}
    targets = {rank: RankPool("hnd", component, decode, rank, pages=16, page_size=32, seed=1) for rank in (2, 3)}
    sources, free = PageAllocator(32, 1), PageAllocator(16, 2)
    written = []
    for prompt in model.prompts(3, 6):
        tokens = len(prompt)
        kv, first, _ = model.prefill(prompt)
        table, place = sources.take(pages_for(tokens, 16)), free.take(pages_for(tokens, 32))
        for rank, pool in pools.items():
            pool.write(table, cut(kv, component, prefill, rank))
        moved = assemble({rank: pool.read(table, tokens) for rank, pool in pools.items()}, component, prefill).kv
        for rank, pool in targets.items():
            pool.write(place, cut(moved, component, decode, rank))
        written.append((place, Interval(0, tokens)))
        shards = {rank: pool.read(place, tokens) for rank, pool in targets.items()}
        for rank, shard in shards.items():
            assert compare(fingerprints(kv), shard, component, decode, rank) == []
        arrived, differences = assemble(shards, component, decode)
        assert differences == []
        assert [first, *model.generate(arrived, first, COUNT)] == model.undivided(prompt, COUNT)
    assert [line for pool in targets.values() for line in pool.untouched(written)] == []


# --- what needs no torch ------------------------------------------------------------------------------------------------


def test_prompts_are_of_different_lengths_and_mostly_partial():
    prompts = ModelShape().prompts(80, 0)
    lengths = [len(prompt) for prompt in prompts]
    assert all(24 <= length <= 120 for length in lengths)
    assert all((length % 16 == 0) == (i % 8 == 7) for i, length in enumerate(lengths))
    partial = [length for length in lengths if length % 16]
    assert len(set(partial)) == len(partial)
    assert len(set(lengths[:16])) == 16
    assert all(0 <= token < 512 for prompt in prompts for token in prompt)
    assert prompts == ModelShape().prompts(80, 0)
    assert prompts != ModelShape().prompts(80, 1)
    assert prompts[:16] == ModelShape().prompts(16, 0)


def test_spec_says_what_the_kv_is():
    component = ModelShape(kv_heads=2, layers=6).spec().components[0]
    assert component.layers == tuple(range(6))
    assert (component.kv_heads, component.kv_factor, component.row_bytes) == (2, 2, 128)
    assert component.dtype == "float32"
    shapes = [ModelShape(), ModelShape(seed=1), ModelShape(layers=5), ModelShape(kv_heads=8)]
    assert len({shape.spec().fingerprint for shape in shapes}) == 4
    assert ModelShape().spec() == ModelShape().spec()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kv_heads": 3}, "--kv-heads"),
        ({"kv_heads": 0}, "--kv-heads"),
        ({"kv_heads": 16}, "--kv-heads"),
        ({"layers": 0}, "--layers"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_refused_by_name(options, field):
    with pytest.raises(ConfigError) as error:
        DemoModel(**options)
    assert error.value.field == field


def test_number_of_requests_is_bounded():
    for requests in (0, -1, 5000):
        with pytest.raises(ConfigError, match="--requests"):
            ModelShape().prompts(requests, 0)


def test_wrong_input_is_refused(model):
    kv, first, _ = model.prefill([1, 2, 3])
    for wrong in (kv[:2], kv[:, :1], kv[:, :, :, :2], kv[0], kv.astype(np.float64)):
        with pytest.raises(LocalProtocolError):
            model.generate(wrong, first, 1)
    for tokens in ([], [512], [-1], [0] * 1025):
        with pytest.raises(LocalProtocolError):
            model.prefill(tokens)
