"""Our words as the messages of `wire` carry them, and back: configs, layouts, chunks and errors."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from rdma_kv.errors import ConfigError, ErrorCode, IncompatiblePeerError, RdmaKvError, RemoteProtocolError
from rdma_kv.kernels.launch import Chunk
from rdma_kv.layout import Int64Array, KvLayout, Origin
from rdma_kv.messages import MAX_TEXT
from rdma_kv.protocol.link import Process, component_facts, read_component, read_topology, topology_facts
from rdma_kv.session import AgentConfig
from rdma_kv.sidecar.wire import VERSION, Attach, Fault, GpuFacts, Place, Register, Replica, Work
from rdma_kv.topology import ModelSpec, TieBreak
from rdma_kv.types import Owned, ReplicaId, Role

_INT64, _INT32 = np.dtype("<i8"), np.dtype("<i4")
_MOST_TEXT = 16 << 10  # characters of an error


# --- errors ------------------------------------------------------------------------------------------------------------


def _classes() -> dict[ErrorCode, type[RdmaKvError]]:
    found: dict[ErrorCode, type[RdmaKvError]] = {}
    left: list[type[RdmaKvError]] = [RdmaKvError]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if "code" in vars(kind) and kind is not RdmaKvError and kind.__module__ == RdmaKvError.__module__:
            found[kind.code] = kind
    return found


_CLASS_OF = _classes()


def sendable(text: str, most: int = _MOST_TEXT) -> str:
    """Text that a message can carry: names of files, for instance, need not be Unicode."""
    return text[:most].encode("utf-8", "replace").decode()


def fault_of(error: RdmaKvError) -> Fault:
    """An error as a message carries it: class, text and facts."""
    facts: dict[str, Any] = {}
    for name, value in vars(error).items():
        if isinstance(value, IntEnum):
            facts[name] = int(value)
        elif isinstance(value, tuple):
            facts[name] = [int(each) for each in value]
        elif isinstance(value, str):
            facts[name] = sendable(value)
        elif isinstance(value, (int, float)):
            facts[name] = value
    return Fault(error.code, sendable(str(error)), facts)


def error_of(fault: Fault) -> RdmaKvError:
    """The error that a fault tells: of the same class, with the same text and facts. Its constructor does not run."""
    kind = _CLASS_OF[fault.code]
    error = kind.__new__(kind)
    error.args = (fault.text,)
    facts: dict[str, Any] = dict(fault.facts)
    if "cause" in facts:
        try:
            facts["cause"] = ErrorCode(facts["cause"])
        except ValueError:
            facts["cause"] = ErrorCode.TRANSFER_ABORTED
    for name, value in facts.items():
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error


# --- who attaches ------------------------------------------------------------------------------------------------------


def attach_of(config: AgentConfig, gpu: GpuFacts | None, process: Process) -> Attach:
    """What a client says of itself. Everything else in its config is the sidecar's to say."""
    return Attach(
        version=VERSION,
        cluster=config.cluster,
        engine=config.engine,
        role=config.role.value,
        ranks=[int(rank) for rank in config.ranks],
        topology=topology_facts(config.topology),
        tie_break=config.tie_break.value,
        fingerprint=config.model.fingerprint,
        components=[component_facts(component, 0) for component in config.model.components],
        checksum=config.checksum,
        gpu=gpu,
        host=process.host,
        pid=process.pid,
        started=process.started,
    )


def check_version(who: str, message: Attach) -> None:
    """Raises IncompatiblePeerError, field `version`, where a client speaks another version."""
    if message.version != VERSION:
        text = f"{message.version} there, {VERSION} here; install the same rdma-kv in the engine and the sidecar"
        raise IncompatiblePeerError(who, "version", text)


def role_of(message: Attach) -> Role:
    """Raises ConfigError, field `role`, where it is none."""
    try:
        return Role(message.role)
    except ValueError as exc:
        raise ConfigError("role", str(exc)) from exc


def config_of(message: Attach, **of_the_sidecar: Any) -> AgentConfig:  # noqa: ANN401 - fields of AgentConfig
    """The config of the agent that a client wants.

    Raises:
        ConfigError: it cannot work; the field is named.
    """
    try:
        tie_break = TieBreak(message.tie_break)
    except ValueError as exc:
        raise ConfigError("tie_break", str(exc)) from exc
    return AgentConfig(
        engine=message.engine,
        role=role_of(message),
        ranks=tuple(message.ranks),
        topology=read_topology(message.topology),
        model=ModelSpec(tuple(read_component(each) for each in message.components), message.fingerprint),
        cluster=message.cluster,
        tie_break=tie_break,
        checksum=message.checksum,
        **of_the_sidecar,
    )


def replica_of(replica: ReplicaId | None) -> Replica | None:
    return None if replica is None else (replica.engine, replica.index)


def replica_id(replica: Replica | None) -> ReplicaId | None:
    return None if replica is None else ReplicaId(*replica)


# --- pools and chunks --------------------------------------------------------------------------------------------------


def register_of(component: str, layout: KvLayout, addresses: Int64Array, sizes: Int64Array, owned: Owned) -> Register:
    """A pool as the engine's process has it."""
    return Register(  # whose numbers may be NumPy's
        component=component,
        replica=int(owned.replica),
        rank=int(owned.rank),
        origins=np.array(layout.origins, _INT64).tobytes(),
        kv_factor=int(layout.kv_factor),
        num_pages=int(layout.num_pages),
        page_size=int(layout.page_size),
        heads=int(layout.heads),
        row_bytes=int(layout.row_bytes),
        page_stride=int(layout.page_stride),
        token_stride=int(layout.token_stride),
        head_stride=int(layout.head_stride),
        name=sendable(layout.name, MAX_TEXT),
        addresses=addresses.astype(_INT64).tobytes(),
        sizes=sizes.astype(_INT64).tobytes(),
    )


def layout_of(who: str, message: Register) -> KvLayout:
    """The layout of a pool.

    Raises:
        RemoteProtocolError: arrays that cannot be one.
        ConfigError: it cannot work.
    """
    table = int64s(who, "origins", message.origins)
    if not message.kv_factor or not table.size or table.size % (2 * message.kv_factor):
        raise RemoteProtocolError(who, f"origins: {table.size} numbers for kv_factor {message.kv_factor}")
    buffers = len(message.addresses) // _INT64.itemsize
    named = table.reshape(-1, 2)[:, 0]
    if named.min() < 0 or named.max() >= buffers:  # before anything is made that is as long
        raise RemoteProtocolError(who, f"origins: buffers {named.min()} to {named.max()}, and {buffers} were told")
    layers = table.reshape(-1, message.kv_factor, 2).tolist()
    return KvLayout(
        tuple(tuple(Origin(*origin) for origin in planes) for planes in layers),
        message.num_pages,
        message.page_size,
        message.heads,
        message.row_bytes,
        message.page_stride,
        message.token_stride,
        message.head_stride,
        name=message.name,
    )


def int64s(who: str, field: str, body: bytes) -> Int64Array:
    """An int64 array of its own memory.

    Raises:
        RemoteProtocolError: not whole numbers of 8 bytes.
    """
    return _array(who, field, body, _INT64).astype(np.int64)


def work_of(
    number: int,
    chunk: Chunk,
    packed: Place,
    bounce: Place | None,
    *,
    scatter: bool,
    checksum: bool,
    expected: int | None,
    after: list[int],
) -> Work:
    """A chunk for the process that has the pools."""
    return Work(
        work=number,
        scatter=scatter,
        packed=packed,
        bounce=bounce,
        pointers=chunk.pointers.astype(_INT64).tobytes(),
        planes=chunk.planes,
        token_pool=chunk.token_pool.astype(_INT32).tobytes(),
        token_offset=chunk.token_offset.astype(_INT64).tobytes(),
        heads=chunk.heads,
        head_stride=chunk.head_stride,
        row_bytes=chunk.row_bytes,
        checksum=checksum,
        expected=expected,
        after=after,
    )


def chunk_of(who: str, message: Work, packed_address: int) -> Chunk:
    """The chunk that a sidecar asks for, shapes and ranges checked; its addresses are not.

    Raises:
        RemoteProtocolError: it cannot be one.
    """
    pointers = int64s(who, "pointers", message.pointers)
    if not message.planes or pointers.size % message.planes:
        raise RemoteProtocolError(who, f"pointers: {pointers.size} for {message.planes} planes")
    chunk = Chunk(
        packed_address,
        pointers.reshape(-1, message.planes),
        _array(who, "token_pool", message.token_pool, _INT32).astype(np.int32),
        int64s(who, "token_offset", message.token_offset),
        message.heads,
        message.head_stride,
        message.row_bytes,
    )
    try:
        chunk.validate()
    except ConfigError as exc:
        raise RemoteProtocolError(who, f"a chunk that cannot be one: {exc}") from exc
    return chunk


def _array(who: str, field: str, body: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if len(body) % dtype.itemsize:
        raise RemoteProtocolError(who, f"{field}: {len(body)} bytes are no array of {dtype.itemsize}-byte numbers")
    return np.frombuffer(body, dtype=dtype)
