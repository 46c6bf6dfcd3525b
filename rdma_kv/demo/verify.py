"""Is the KV that arrived the KV that prefill wrote? And would we notice if it were not?

`fingerprints` goes from prefill to whoever judges: one digest of each (layer, K or V, head) over its tokens and
elements, in the bytes that prefill wrote. `compare` holds a decode rank's shard against it.

A check that cannot fail proves nothing, hence two controls, both on copies:

* `overwrite_page` flips the sign of all K and V, or of the latents, of one page (`control_page_size`: of enough tokens).
  Decoding from that copy *must* give other tokens. The tokens alone are no proof of equal bytes: attention does not care
  for the order of cached tokens (their positions are inside K already), so pages that changed places among themselves
  decode to the same tokens. The bytes see that.
* `alter_head` flips the lowest bit of every word of one head of one page, the smallest change there is. `compare` *must*
  name exactly that head; `alteration_is_seen` tries it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from rdma_kv.demo.model import KvArray
from rdma_kv.demo.pools import Share, pages_for, plane_name
from rdma_kv.errors import LocalProtocolError
from rdma_kv.topology import Component, Topology

CONTROL_TOKENS = 16
"""Overwriting as many changed the decoded tokens in each of 1200 tries; of one token alone, 4 in 960 went unnoticed."""

Fingerprints = Sequence[Sequence[Sequence[bytes]]]
"""16-byte digests `[layers][kv][heads]`; plain lists, as MessagePack carries them."""


def fingerprints(kv: KvArray) -> list[list[list[bytes]]]:
    """BLAKE2b-16 of each (layer, K or V, head) of `kv` `[layers, kv, tokens, heads, dim]`, over tokens x dim."""
    by_head = np.ascontiguousarray(kv.transpose(0, 1, 3, 2, 4))  # [layers, kv, heads, tokens, dim]
    return [
        [[hashlib.blake2b(rows.tobytes(), digest_size=16).digest() for rows in plane] for plane in layer]
        for layer in by_head
    ]


def compare(expected: Fingerprints, shard: KvArray, component: Component, topology: Topology, rank: int) -> list[str]:
    """Where one rank's shard is not what prefill wrote; empty when every byte is equal.

    Args:
        expected: `fingerprints` of the whole KV over the same token positions as `shard`.
        shard: float32 `[layers of the stage, kv, tokens, heads of the rank, dim]`.

    Raises:
        LocalProtocolError: either side does not have the form of the component.
    """
    layers, heads = Share.of(component, topology, rank)
    form = (len(component.layers), component.kv_factor, component.kv_heads)
    if len(expected) != form[0] or any(
        len(layer) != form[1] or any(len(plane) != form[2] for plane in layer) for layer in expected
    ):
        raise LocalProtocolError(f"the fingerprints are not [layers][kv][heads] of {list(form)}")
    if shard.ndim != 5 or (*shard.shape[:2], shard.shape[3]) != (layers.size, component.kv_factor, heads.size):
        raise LocalProtocolError(f"shard of rank {rank} has shape {list(shard.shape)}")
    return [
        _difference(component, layer, kv, head, rank)
        for layer, planes in enumerate(fingerprints(shard), layers.start)
        for kv, digests in enumerate(planes)
        for head, digest in enumerate(digests, heads.start)
        if digest != bytes(expected[layer][kv][head])
    ]


def _difference(component: Component, layer: int, kv: int, head: int, rank: int) -> str:
    return (
        f"layer {component.layers[layer]} {plane_name(component, kv)} head {head} on rank {rank} "
        "is not what prefill wrote"
    )


def overwrite_page(kv: KvArray, page: int, page_size: int) -> KvArray:
    """A copy of `kv` in which one page of the request holds the negated values, in all layers, K and V, all heads.

    Args:
        kv: float32 `[layers, kv, tokens, heads, dim]` of a whole model or of one rank.
        page: which page of the request, not a pool's page number; positions `[page * page_size, (page + 1) *
            page_size)`, as far as there are tokens.
    """
    copy = kv.copy()
    _page_of(copy, page, page_size)[:] *= np.float32(-1)
    return copy


def control_page_size(page_size: int, tokens: int) -> int:
    """Tokens for `overwrite_page` that must show in decoding: whole pages that hold `CONTROL_TOKENS`, or all `tokens`."""
    return min(pages_for(CONTROL_TOKENS, page_size) * page_size, tokens)


def alter_head(shard: KvArray, *, layer: int, kv: int, head: int, page: int, page_size: int) -> KvArray:
    """A copy of `shard` in which the lowest bit of every word of one head of one page of the request is flipped.

    Args:
        shard: float32 `[layers, kv, tokens, heads, dim]`; `layer`, `kv` and `head` are its own indices.
        page: as in `overwrite_page`.
    """
    copy = shard.copy()
    _page_of(copy, page, page_size)[layer, kv, :, head].view(np.uint32)[:] ^= np.uint32(1)
    return copy


def alteration_is_seen(
    expected: Fingerprints,
    shard: KvArray,
    component: Component,
    topology: Topology,
    rank: int,
    *,
    page: int,
    page_size: int,
) -> bool:
    """The second control: alter one head of one page on a copy of each layer and plane of `shard` in turn.

    Which head is altered moves on from case to case, so that all of them have their turn where there are enough layers.

    Returns:
        True when `compare` names the altered head, and nothing else that it did not name before, every time.
    """
    layers, heads = Share.of(component, topology, rank)
    before = compare(expected, shard, component, topology, rank)
    for case, (layer, kv) in enumerate(np.ndindex(layers.size, component.kv_factor)):
        head = case % heads.size
        altered = alter_head(shard, layer=layer, kv=kv, head=head, page=page, page_size=page_size)
        added = set(compare(expected, altered, component, topology, rank)) - set(before)
        if added != {_difference(component, layers.start + layer, kv, heads.start + head, rank)}:
            return False
    return True


def _page_of(kv: KvArray, page: int, page_size: int) -> KvArray:
    """View of the tokens of one page of a request, `[layers, kv, tokens of the page, heads, dim]`."""
    if not 0 <= page < pages_for(kv.shape[2], page_size):
        raise LocalProtocolError(f"{kv.shape[2]} tokens have no page {page} of {page_size}")
    return kv[:, :, page * page_size : (page + 1) * page_size]
