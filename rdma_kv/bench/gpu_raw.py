"""NIXL's own API between memory of two processes, used as its documentation shows, a descriptor a piece.

A default agent with its progress thread on both sides. The target needs nothing but that thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rdma_kv.bench.gpu_memory import Int64Array, Kv, KvMemory, indices
from rdma_kv.errors import TransportError
from rdma_kv.transport.nixl_owner import load_nixl
from rdma_kv.types import Role

_LIMIT_S = 30.0  # of one operation


class RawNixl:
    """One side. The initiator is the prefill side."""

    def __init__(self, role: Role, memory: KvMemory) -> None:
        """Make the agent and register the memory.

        Raises:
            RdmaKvError: NIXL is not there, or refused.
        """
        nixl = load_nixl()
        self._errors = nixl.errors
        self._memory = memory
        self._kind = "VRAM" if memory.device else "DRAM"
        self._target = (0, 0, "")  # address and NIXL's device of its memory, and its kind
        self._peer = ""
        self._agent: Any = self._translated(
            lambda: nixl.api.nixl_agent(role.value, nixl.api.nixl_agent_config(backends=["UCX"]))
        )
        place = (memory.address, memory.length_bytes, memory.ordinal or 0, "")
        self._translated(lambda: self._agent.register_memory([place], self._kind))

    def opened(self) -> bytes:
        """What the other side needs."""
        metadata = self._translated(self._agent.get_agent_metadata)
        return msgspec.msgpack.encode((metadata, self._memory.address, self._memory.ordinal or 0, self._kind))

    def connect(self, other: bytes) -> None:
        """The initiator: make the target's memory writable from here."""
        metadata, *target = msgspec.msgpack.decode(other)
        self._target = (target[0], target[1], target[2])
        self._peer = self._translated(lambda: self._agent.add_remote_agent(metadata)).decode()

    def write(self, piece_bytes: int, total_bytes: int) -> float:
        """One WRITE of scattered pieces to scattered places: seconds from addresses in an array to DONE.

        Raises:
            TransportError: it failed, or took too long.
        """
        src, dst = places(piece_bytes, total_bytes, self._memory.length_bytes)
        address, ordinal, kind = self._target
        local = _table(self._memory.address + src, piece_bytes, self._memory.ordinal or 0)
        remote = _table(address + dst, piece_bytes, ordinal)
        return float(self._translated(lambda: self._write(local, remote, kind)))

    def _write(self, local: npt.NDArray[np.uint64], remote: npt.NDArray[np.uint64], kind: str) -> float:
        agent, begin = self._agent, time.perf_counter()
        ours, theirs = agent.get_xfer_descs(local, self._kind), agent.get_xfer_descs(remote, kind)
        handle = agent.initialize_xfer("WRITE", ours, theirs, self._peer, b"n")
        state = agent.transfer(handle)
        while state == "PROC" and time.perf_counter() - begin < _LIMIT_S:
            state = agent.check_xfer_state(handle)
        took_s = time.perf_counter() - begin
        if state != "DONE":
            raise TransportError("nixl", state, f"a transfer of NIXL's API is {state} after {took_s:.1f} s")
        agent.release_xfer_handle(handle)
        return took_s

    def _translated(self, call: Callable[[], Any]) -> Any:  # noqa: ANN401 - what NIXL returns
        try:
            return call()
        except self._errors as exc:
            raise TransportError("nixl", type(exc).__name__, f"NIXL's API: {exc}") from exc


def places(piece_bytes: int, total_bytes: int, pool_bytes: int) -> tuple[Int64Array, Int64Array]:
    """Offset of each piece at the source and at the target, int64 `[pieces]`; a single piece lies at the begin."""
    count = total_bytes // piece_bytes
    if count == 1:
        return np.zeros(1, np.int64), np.zeros(1, np.int64)
    orders = [np.random.default_rng(seed).permutation(pool_bytes // piece_bytes)[:count] for seed in (1, 2)]
    src, dst = (order.astype(np.int64) * piece_bytes for order in orders)
    return src, dst


def wrong_pieces(piece_bytes: int, total_bytes: int, arrived: Kv, sent: Kv) -> int:
    """Pieces of a WRITE that are not at their places in the target's pool."""
    src, dst = (indices(offsets // piece_bytes, sent) for offsets in places(piece_bytes, total_bytes, len(sent)))
    whole = len(sent) // piece_bytes * piece_bytes
    here, there = (pool[:whole].reshape(-1, piece_bytes) for pool in (arrived, sent))
    return int((here[dst] != there[src]).any(1).sum())


def _table(addresses: Int64Array, length_bytes: int, ordinal: int) -> npt.NDArray[np.uint64]:
    """`[pieces, (address, bytes, device)]`, the fastest form that the API takes."""
    columns = (addresses, np.full_like(addresses, length_bytes), np.full_like(addresses, ordinal))
    return np.column_stack(columns).astype(np.uint64)
