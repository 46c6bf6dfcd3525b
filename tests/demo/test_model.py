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
from rdma_kv.demo.pools import PageAllocator, RankPool, assemble, check_pools, cut, pages_for
from rdma_kv.demo.verify import compare, control_page_size, fingerprints, overwrite_page
from rdma_kv.errors import ConfigError, LocalProtocolError
from rdma_kv.topology import Topology
from rdma_kv.types import Interval

COUNT = 16
KV_HEADS = [1, 2, 4, 8]
MODELS = [*KV_HEADS, "mla"]  # qwen2 by its KV heads
TASKS = Path("/proc/self/task")


def os_threads():
    return len(list(TASKS.iterdir())) if TASKS.exists() else 0


def refuse(*_args):
    raise AssertionError("the model must not use the network")


@pytest.fixture(scope="module")
def warmed():
    """(the default models, OS and Python threads before, the same after); built with the network refused."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        pytest.skip("needs torch and transformers")
    before = os_threads(), threading.active_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket.socket, "connect_ex", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        models = warm(ModelShape()), warm(ModelShape(model="mla"))
    return models, before, (os_threads(), threading.active_count())


@pytest.fixture(scope="module")
def model(warmed):
    return warmed[0][0]


@pytest.fixture(scope="module")
def mla(warmed):
    return warmed[0][1]


@pytest.fixture(scope="module")
def models(model, mla):
    """By `MODELS`: qwen2 for each number of KV heads, with seeds of their own, and mla."""
    return {4: model, "mla": mla} | {kv_heads: DemoModel(10 + kv_heads, kv_heads=kv_heads) for kv_heads in (1, 2, 8)}


def test_importing_is_cheap():
    code = "import sys, rdma_kv.demo.model, rdma_kv.demo.pools, rdma_kv.demo.verify; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.strip() == b"False"


def test_warming_starts_no_thread(warmed):
    _, before, after = warmed
    assert before == after


@pytest.mark.parametrize("which", [4, "mla"])
def test_forked_child_computes_the_same(models, which):
    model = models[which]
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
            rebuilt = DemoModel(model=model.shape.model).undivided(prompt, COUNT)
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


@pytest.mark.parametrize("which", MODELS)
def test_tokens_from_the_kv_alone_equal_the_undivided_run(models, which):
    model = models[which]
    distinct = []
    for prompt in model.prompts(4, 3):
        kv, first, extras = model.prefill(prompt)
        assert kv.shape == ((4, 1, len(prompt), 1, 80) if which == "mla" else (4, 2, len(prompt), which, 32))
        assert kv.shape == model.shape.kv_shape(len(prompt))
        assert kv.dtype == np.float32
        assert np.isfinite(kv).all()
        assert extras["prompt_tokens"] == len(prompt)
        tokens = model.generate(kv, first, COUNT)
        assert [first, *tokens] == model.undivided(prompt, COUNT)
        distinct.append(len(set(tokens)))
    assert np.mean(distinct) >= 10


@pytest.mark.parametrize("which", [4, "mla"])
def test_undivided_run_equals_a_run_without_any_cache(models, which):
    """Oracle: the whole sequence again for every token, by the model's own forward."""
    model = models[which]
    torch = model._torch
    for prompt in model.prompts(2, 1):
        tokens = []
        with torch.inference_mode():
            for _ in range(COUNT + 1):
                logits = model._model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))
        assert model.undivided(prompt, COUNT) == tokens


def test_latents_are_what_attention_makes_of_its_input(mla):
    """Oracle: the compressed latent after its norm, and the key turned as complex numbers by position and frequency."""
    compressed, normed = {}, {}
    hooks = []
    for index, layer in enumerate(mla._model.model.layers):
        attention = layer.self_attn
        for kept, module in ((compressed, attention.kv_a_proj_with_mqa), (normed, attention.kv_a_layernorm)):
            hooks.append(
                module.register_forward_hook(
                    lambda _m, _i, out, kept=kept, index=index: kept.update({index: out.numpy()})
                )
            )
    try:
        prompt = mla.prompts(1, 9)[0]
        kv = mla.prefill(prompt).kv
    finally:
        for hook in hooks:
            hook.remove()
    angles = np.arange(len(prompt))[:, None] / 10_000.0 ** (np.arange(8) / 8)
    for index in range(4):
        np.testing.assert_array_equal(kv[index, 0, :, 0, :64], normed[index][0])
        latent, key = compressed[index][0, :, :64].astype(np.float64), compressed[index][0, :, 64:]
        scaled = latent / np.sqrt((latent**2).mean(axis=-1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(kv[index, 0, :, 0, :64], scaled, rtol=1e-4, atol=1e-5)
        turned = (key[:, 0::2] + 1j * key[:, 1::2]) * np.exp(1j * angles)
        wanted = np.concatenate([turned.real, turned.imag], axis=-1)
        np.testing.assert_allclose(kv[index, 0, :, 0, 64:], wanted, rtol=1e-4, atol=1e-4)


def test_latents_are_all_that_the_cache_holds(mla):
    """80 elements a token and layer; expanded keys and values would be 8 heads of 48 and 32."""
    cache = mla._new_cache()
    mla._forward([1, 2, 3], cache)
    mla._forward([4], cache)
    shapes = {(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in cache.layers}
    assert shapes == {((1, 1, 4, 64), (1, 1, 4, 16))}


def test_tokens_need_the_latent_and_the_rotated_key(mla):
    kv, first, _ = mla.prefill(mla.prompts(1, 5)[0])
    tokens = mla.generate(kv, first, COUNT)
    for part in (slice(64), slice(64, 80)):
        damaged = kv.copy()
        damaged[..., part] = 0
        assert mla.generate(damaged, first, COUNT) != tokens


def test_library_that_caches_expanded_keys_and_values_is_refused(mla, monkeypatch):
    """As transformers did before 5.15; 48 and 32 elements make 80 too."""

    class Expanded:
        def __init__(self):
            torch = mla._torch
            layer = type("Layer", (), {"keys": torch.zeros(1, 8, 2, 48), "values": torch.zeros(1, 8, 2, 32)})
            self.layers = [layer] * 4

    monkeypatch.setattr(mla, "_new_cache", Expanded)
    monkeypatch.setattr(mla, "_forward", lambda tokens, cache: mla._torch.zeros(512))
    with pytest.raises(ConfigError, match="transformers"):
        mla.prefill([0, 1])


@pytest.mark.parametrize("which", [4, "mla"])
def test_a_launch_is_a_prefill_in_pieces(models, which):
    """On the CPU it is over at once: no event, and no stream to be on."""
    model = models[which]
    prompt = model.prompts(1, 4)[0]
    wanted = model.prefill(prompt)
    with model.scope():
        launched = model.launch(prompt)
        assert model.record() is None
    first, extras = model.output(launched)
    assert (first, extras) == (wanted.first_token, wanted.extras)
    np.testing.assert_array_equal(model.fetch(launched), wanted.kv)


@pytest.mark.parametrize("which", MODELS)
def test_any_overwritten_page_changes_the_tokens(models, which):
    model = models[which]
    for prompt in model.prompts(2, 21):
        kv, first, _ = model.prefill(prompt)
        tokens = model.generate(kv, first, COUNT)
        for page_size in (control_page_size(1, len(prompt)), 32):
            last = pages_for(len(prompt), page_size) - 1
            for page in {0, last // 2, last}:
                assert model.generate(overwrite_page(kv, page, page_size), first, COUNT) != tokens


@pytest.mark.usefixtures("warmed")
@pytest.mark.parametrize("kind", ["qwen2", "mla"])
def test_other_seeds_and_depths_are_sensitive_too(kind):
    for seed, layers in [(101, 4), (102, 2), (103, 6)]:
        model = DemoModel(seed, layers=layers, model=kind)
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


@pytest.mark.parametrize("which", [4, "mla"])
def test_generate_only_reads_its_kv(models, which):
    model = models[which]
    kv, first, _ = model.prefill(model.prompts(1, 4)[0])
    kv.setflags(write=False)
    before = kv.tobytes()
    assert model.generate(kv, first, 3) == model.generate(np.asfortranarray(kv), first, 3)
    assert kv.tobytes() == before


@pytest.mark.parametrize(
    ("which", "source", "destination", "prefill", "decode"),
    [
        (4, ("nhd", 16), ("hnd", 32), Topology.with_layers(4, tp=2), Topology.with_layers(4, tp=4, dp=2)),
        (4, ("sglang", 4), ("lightllm", 1), Topology(pp=2, layers_per_stage=(3, 1)), Topology.with_layers(4, tp=2)),
        (2, ("lightllm", 1), ("trtllm", 32), Topology.with_layers(4, tp=4), Topology(pp=2, layers_per_stage=(1, 3))),
        ("mla", ("mla", 64), ("mla", 16), Topology(pp=2, layers_per_stage=(3, 1)), Topology.with_layers(4, tp=2)),
        ("mla", ("nhd", 16), ("hnd", 8), Topology.with_layers(4, tp=2, dp=2), Topology(pp=2, layers_per_stage=(1, 3))),
    ],
)
def test_tokens_survive_the_pools_of_both_sides(models, which, source, destination, prefill, decode):
    """The demo without a transfer: cut, paged, read back, joined, decoded, verified."""
    model = models[which]
    component = model.spec().components[0]
    (layout, page), (other, place_page) = source, destination
    for side, topology in ((source, prefill), (destination, decode)):
        check_pools(side[0], component, topology, side[1])
    prompts = model.prompts(2, 6)
    pages, places = (sum(pages_for(len(prompt), size) for prompt in prompts) + 3 for size in (page, place_page))
    pools = {
        rank: RankPool(layout, component, prefill, rank, pages=pages, page_size=page)
        for rank in prefill.replica_ranks(0)
    }
    targets = {
        rank: RankPool(other, component, decode, rank, pages=places, page_size=place_page, seed=1)
        for rank in decode.replica_ranks(decode.dp - 1)
    }
    sources, free = PageAllocator(pages, 1), PageAllocator(places, 2)
    written = []
    for prompt in prompts:
        tokens = len(prompt)
        kv, first, _ = model.prefill(prompt)
        table, place = sources.take(pages_for(tokens, page)), free.take(pages_for(tokens, place_page))
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


def test_spec_of_a_latent():
    component = ModelShape(model="mla", layers=6).spec().components[0]
    assert component.layers == tuple(range(6))
    assert (component.kv_heads, component.kv_factor, component.row_bytes) == (1, 1, 320)
    assert component.dtype == "float32"
    assert component.replicated
    shapes = [ModelShape(), ModelShape(kv_heads=1), ModelShape(model="mla"), ModelShape(seed=1, model="mla")]
    assert len({shape.spec().fingerprint for shape in shapes}) == 4


def test_a_latent_is_one_head_whether_said_or_not():
    assert ModelShape(model="mla") == ModelShape(kv_heads=1, model="mla")
    assert ModelShape(model="mla").kv_heads == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"model": "llama"}, "--model"),
        ({"model": "mla", "kv_heads": 2}, "--kv-heads"),
        ({"model": "mla", "kv_heads": 8}, "--kv-heads"),
        ({"model": "mla", "layers": 0}, "--layers"),
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


def test_wrong_input_is_refused(model, mla):
    kv, first, _ = model.prefill([1, 2, 3])
    for wrong in (kv[:2], kv[:, :1], kv[:, :, :, :2], kv[0], kv.astype(np.float64)):
        with pytest.raises(LocalProtocolError):
            model.generate(wrong, first, 1)
        with pytest.raises(LocalProtocolError):
            mla.generate(wrong, first, 1)
    latents = mla.prefill([1, 2, 3]).kv
    for wrong in (latents[..., :64], latents[:3], latents[0], np.concatenate([latents, latents], axis=1)):
        with pytest.raises(LocalProtocolError):
            mla.generate(wrong, first, 1)
    for tokens in ([], [512], [-1], [0] * 1025):
        with pytest.raises(LocalProtocolError):
            model.prefill(tokens)
