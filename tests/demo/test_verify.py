"""Fingerprints, the byte comparison and both controls: each must be able to fail."""

import hashlib

import msgspec
import numpy as np
import pytest

from rdma_kv.demo import verify
from rdma_kv.demo.pools import cut
from rdma_kv.demo.verify import (
    alter_head,
    alteration_is_seen,
    compare,
    control_page_size,
    fingerprints,
    overwrite_page,
)
from rdma_kv.errors import LocalProtocolError
from rdma_kv.topology import ModelSpec, Topology

TOKENS = 21
PAGE = 8
GQA = ModelSpec.gqa(layers=3, kv_heads=4, head_dim=8, itemsize=4, dtype="float32").components[0]
MLA = ModelSpec.mla(layers=3, latent_dim=8, itemsize=4, dtype="float32").components[0]
TOPOLOGIES = [
    Topology(layers_per_stage=(3,)),
    Topology(tp=2, layers_per_stage=(3,)),
    Topology(tp=4, dp=2, pp=2, layers_per_stage=(1, 2)),
    Topology(tp=8, layers_per_stage=(3,)),
]


@pytest.fixture
def kv():
    return np.random.default_rng(5).standard_normal((3, 2, TOKENS, 4, 8)).astype(np.float32)


def test_fingerprints_are_blake2b_of_the_rows_in_order(kv):
    found = fingerprints(kv)
    assert [len(found), len(found[0]), len(found[0][0])] == [3, 2, 4]
    for layer, plane, head in np.ndindex(3, 2, 4):
        rows = b"".join(kv[layer, plane, token, head].tobytes() for token in range(TOKENS))
        assert found[layer][plane][head] == hashlib.blake2b(rows, digest_size=16).digest()


def test_fingerprints_do_not_depend_on_memory_order(kv):
    assert fingerprints(np.asfortranarray(kv)) == fingerprints(kv)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_equal_shards_compare_equal_over_the_wire(kv, topology):
    expected = msgspec.msgpack.decode(msgspec.msgpack.encode(fingerprints(kv)))
    for rank in range(topology.num_ranks):
        assert compare(expected, cut(kv, GQA, topology, rank), GQA, topology, rank) == []


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_bit_anywhere_is_named(kv, topology):
    expected = fingerprints(kv)
    rng = np.random.default_rng(1)
    for rank in range(topology.num_ranks):
        for _ in range(8):
            layer, plane, token, head, element = (int(rng.integers(n)) for n in kv.shape)
            damaged = kv.copy()
            damaged.view(np.uint32)[layer, plane, token, head, element] ^= np.uint32(1 << rng.integers(32))
            found = compare(expected, cut(damaged, GQA, topology, rank), GQA, topology, rank)
            heads, layers = holdings(topology, rank)
            if layer in layers and head in heads:
                plane_letter = "KV"[plane]
                assert found == [f"layer {layer} {plane_letter} head {head} on rank {rank} is not what prefill wrote"]
            else:
                assert found == []


def holdings(topology, rank):
    """Heads and layers of a rank for `TOPOLOGIES`, written out."""
    if topology.tp == 1:
        return [0, 1, 2, 3], [0, 1, 2]
    if topology.tp == 2:
        return [[0, 1], [2, 3]][rank], [0, 1, 2]
    if topology.tp == 8:
        return [rank // 2], [0, 1, 2]
    return [[0, 1], [2, 3], [0, 1], [2, 3]][rank % 4], ([0] if rank < 4 else [1, 2])


def test_kinds_of_damage_are_seen(kv):
    topology = TOPOLOGIES[0]
    expected = fingerprints(kv)
    swapped = kv[:, :, [*range(8, 16), *range(8), *range(16, TOKENS)]]
    for damaged in (swapped, kv[:, ::-1], kv[:, :, :-1], np.zeros_like(kv)):
        assert len(compare(expected, damaged, GQA, topology, 0)) == 24
    assert len(compare(expected, kv[:, :, :, [1, 0, 2, 3]], GQA, topology, 0)) == 12
    assert len(compare(expected, kv[[0, 2, 1]], GQA, topology, 0)) == 16


@pytest.fixture
def latent():
    return np.random.default_rng(5).standard_normal((3, 1, TOKENS, 1, 8)).astype(np.float32)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_bit_of_a_latent_is_named_on_every_rank_of_its_stage(latent, topology):
    expected = fingerprints(latent)
    for layer in range(3):
        damaged = latent.copy()
        damaged.view(np.uint32)[layer, 0, 3, 0, 1] ^= np.uint32(1)
        for rank in range(topology.num_ranks):
            found = compare(expected, cut(damaged, MLA, topology, rank), MLA, topology, rank)
            holds = layer in holdings(topology, rank)[1]
            wanted = f"layer {layer} latent head 0 on rank {rank} is not what prefill wrote"
            assert found == ([wanted] if holds else [])


def test_layers_must_be_those_of_the_stage(kv):
    """Stages of unequal size: the shard of one is no shard of the other."""
    topology = Topology(pp=2, layers_per_stage=(2, 1))
    with pytest.raises(LocalProtocolError):
        compare(fingerprints(kv), cut(kv, GQA, topology, 0), GQA, topology, 1)


def test_wrong_forms_are_refused(kv):
    topology = TOPOLOGIES[1]
    shard = cut(kv, GQA, topology, 0)
    for expected in (fingerprints(kv[:2]), fingerprints(kv[:, :1]), fingerprints(shard), []):
        with pytest.raises(LocalProtocolError):
            compare(expected, shard, GQA, topology, 0)
    for wrong in (kv, shard[:2], shard[:, :1], shard[0]):
        with pytest.raises(LocalProtocolError):
            compare(fingerprints(kv), wrong, GQA, topology, 0)


@pytest.mark.parametrize(("page", "tokens"), [(0, (0, 8)), (1, (8, 16)), (2, (16, 21))])
def test_overwrite_page_changes_that_page_of_a_copy(kv, page, tokens):
    before = kv.copy()
    damaged = overwrite_page(kv, page, PAGE)
    np.testing.assert_array_equal(kv, before)
    changed = (damaged != kv).all(axis=(0, 1, 3, 4))
    assert np.flatnonzero(changed).tolist() == list(range(*tokens))
    np.testing.assert_array_equal(damaged[:, :, ~changed], kv[:, :, ~changed])
    assert np.isfinite(damaged).all()


def test_alter_head_flips_one_bit_of_each_word_of_a_copy(kv):
    before = kv.copy()
    damaged = alter_head(kv, layer=1, kv=1, head=2, page=2, page_size=PAGE)
    np.testing.assert_array_equal(kv, before)
    flipped = damaged.view(np.uint32) ^ kv.view(np.uint32)
    wanted = np.zeros_like(flipped)
    wanted[1, 1, 16:, 2] = 1
    np.testing.assert_array_equal(flipped, wanted)


@pytest.mark.parametrize("page", [-1, 3])
def test_controls_refuse_a_page_that_is_not_there(kv, page):
    with pytest.raises(LocalProtocolError):
        overwrite_page(kv, page, PAGE)
    with pytest.raises(LocalProtocolError):
        alter_head(kv, layer=0, kv=0, head=0, page=page, page_size=PAGE)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_alteration_is_seen_on_every_rank_and_page(kv, topology):
    expected = fingerprints(kv)
    for rank in range(topology.num_ranks):
        shard = cut(kv, GQA, topology, rank)
        for page in range(3):
            assert alteration_is_seen(expected, shard, GQA, topology, rank, page=page, page_size=PAGE)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_alteration_of_a_latent_is_seen(latent, topology):
    for rank in range(topology.num_ranks):
        shard = cut(latent, MLA, topology, rank)
        assert alteration_is_seen(fingerprints(latent), shard, MLA, topology, rank, page=2, page_size=PAGE)


@pytest.mark.parametrize(
    ("page_size", "tokens", "wanted"),
    [(1, 24, 16), (3, 24, 18), (8, 120, 16), (16, 120, 16), (32, 120, 32), (32, 24, 24), (1, 5, 5), (256, 120, 120)],
)
def test_control_overwrites_whole_pages_of_enough_tokens(page_size, tokens, wanted):
    assert control_page_size(page_size, tokens) == wanted


@pytest.mark.parametrize(
    "blind",
    [
        lambda found: [],
        lambda found: [line for line in found if " K " in line],
        lambda found: [line for line in found if "layer 2" not in line],
        lambda found: [line.replace("rank 1", "rank 0") for line in found],
        lambda found: found + found and ["something else", *found],
    ],
)
def test_control_fails_when_the_comparison_is_blind(kv, monkeypatch, blind):
    topology = TOPOLOGIES[1]
    sound = verify.compare
    monkeypatch.setattr(verify, "compare", lambda *args: blind(sound(*args)))
    shard = cut(kv, GQA, topology, 1)
    assert not alteration_is_seen(fingerprints(kv), shard, GQA, topology, 1, page=0, page_size=PAGE)
