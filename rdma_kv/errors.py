"""Every error of rdma-kv and its code on the wire, on one screen.

Facts are fields; the text is for people. `ErrorCode` and the classes map one to one, so that the reason for a failure
reaches the peer: there it is the `cause` of a TransferAborted (or, where both sides have the same fault, the same class).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

DEVICE_MEMORY: Final = "device-memory"
"""`RegistrationError.status` of all refusals that concern memory of a GPU."""


class ErrorCode(IntEnum):
    """What an ABORT, REJECT or refused HELLO says on the wire. Values never change their meaning."""

    CONFIG = 1
    LOCAL_PROTOCOL = 2
    REMOTE_PROTOCOL = 3
    INCOMPATIBLE_PEER = 4
    PEER_LOST = 5
    TRANSPORT = 6
    REGISTRATION = 7
    TRANSFER_TIMEOUT = 8
    TRANSFER_ABORTED = 9
    STAGING_FULL = 10
    ROUTE_MISMATCH = 11
    RANGE_UNAVAILABLE = 12
    CLOSED = 13
    FENCE_UNSUPPORTED = 14
    CHECKSUM = 15
    SIDECAR_LOST = 16


class RdmaKvError(Exception):
    """Base of every error that rdma-kv raises on purpose.

    `retryable`: the same request may be tried again, under a new attempt.
    """

    code: ErrorCode = ErrorCode.TRANSFER_ABORTED
    retryable = False

    @property
    def reason(self) -> str:
        """What happened, without whom or which transfer it concerns: what a message to the peer says."""
        return getattr(self, "message", "") or str(self)

    @property
    def told_code(self) -> ErrorCode:
        """What a message to the peer says: the code of the first cause."""
        return self.code


class ConfigError(RdmaKvError):
    """A value given by the user cannot work. `field` names it; the text says how to mend it."""

    code = ErrorCode.CONFIG

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class LocalProtocolError(RdmaKvError):
    """Our own caller used the API out of order (push after finish, a key that is live, ...)."""

    code = ErrorCode.LOCAL_PROTOCOL


class ClosedError(LocalProtocolError):
    """The agent is closed or closing."""

    code = ErrorCode.CLOSED


class PeerError(RdmaKvError):
    """Something about the peer `peer`."""

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(f"{peer}: {message}")
        self.peer = peer
        self.message = message


class RemoteProtocolError(PeerError):
    """The peer sent what the protocol does not allow."""

    code = ErrorCode.REMOTE_PROTOCOL


class IncompatiblePeerError(PeerError):
    """Both sides cannot exchange KV. `field` names what differs."""

    code = ErrorCode.INCOMPATIBLE_PEER

    def __init__(self, peer: str, field: str, message: str) -> None:
        super().__init__(peer, f"{field}: {message}")
        self.field = field


class PeerLostError(PeerError):
    """The peer is gone: its stream closed, or its lease ended."""

    code = ErrorCode.PEER_LOST
    retryable = True


class SidecarLostError(RdmaKvError):
    """An engine and its sidecar have lost each other: one of them has ended or is about to, or does not answer.

    The client reconnects by itself. `where` names who was lost, on the engine's side by the sidecar's socket.
    """

    code = ErrorCode.SIDECAR_LOST
    retryable = True

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where = where
        self.message = message


class TransportError(RdmaKvError):
    """The data plane failed. `backend` names it, `status` is its own word.

    Retryable: a WRITE that failed is often the first that is heard of a peer's death, before the end of its stream.
    """

    code = ErrorCode.TRANSPORT
    retryable = True

    def __init__(self, backend: str, status: str, message: str) -> None:
        super().__init__(f"{backend}: {message} ({status})")
        self.backend = backend
        self.status = status


class RegistrationError(TransportError):
    """Memory could not be registered, or a peer's metadata could not be used."""

    code = ErrorCode.REGISTRATION
    retryable = False


class FenceUnsupported(TransportError):
    """This lane cannot prove that memory is out of the transport's reach; the text says what is needed instead."""

    code = ErrorCode.FENCE_UNSUPPORTED
    retryable = False


class TransferError(RdmaKvError):
    """One transfer ended without success."""

    def __init__(self, transfer: str, stage: str, message: str) -> None:
        super().__init__(f"transfer {transfer}: {message} (at {stage})")
        self.transfer = transfer
        self.stage = stage
        self.message = message


class TransferTimeout(TransferError):
    """A deadline of the transfer passed."""

    code = ErrorCode.TRANSFER_TIMEOUT
    retryable = True


_LASTING = frozenset(
    {
        ErrorCode.CONFIG,
        ErrorCode.LOCAL_PROTOCOL,
        ErrorCode.REMOTE_PROTOCOL,
        ErrorCode.INCOMPATIBLE_PEER,
        ErrorCode.ROUTE_MISMATCH,
        ErrorCode.RANGE_UNAVAILABLE,
    }
)
"""Causes that another attempt does not mend."""


class TransferAborted(TransferError):
    """One participant gave the transfer up. `cause` is the code that it told, `culprit` who began."""

    code = ErrorCode.TRANSFER_ABORTED
    retryable = True

    def __init__(
        self,
        transfer: str,
        stage: str,
        message: str,
        *,
        cause: ErrorCode = ErrorCode.TRANSFER_ABORTED,
        culprit: str = "",
    ) -> None:
        super().__init__(transfer, stage, message)
        self.cause = cause
        self.culprit = culprit
        self.retryable = cause not in _LASTING

    @property
    def told_code(self) -> ErrorCode:
        return self.cause


class RouteMismatchError(TransferError):
    """The two sides computed different routes for one key: their registries or settings differ."""

    code = ErrorCode.ROUTE_MISMATCH


class RangeUnavailableError(TransferError):
    """Decode asked for tokens that prefill does not have."""

    code = ErrorCode.RANGE_UNAVAILABLE


class StagingFull(TransferError):
    """No staging slot can be had, nor will be."""

    code = ErrorCode.STAGING_FULL
    retryable = True


class ChecksumError(TransferError):
    """A chunk arrived with other bytes than were gathered. Nothing of it was written to a page.

    Attributes:
        component: its name.
        layers: global layer numbers of the chunk.
        tokens: [start, end) of its positions, in what the component counts.
        src_rank: prefill rank that gathered it.
        expected, found: the checksum that came with it, and that of what arrived.
        culprit: the agent that sent it; the damage may as well have been done on the way.
    """

    code = ErrorCode.CHECKSUM
    retryable = True

    def __init__(
        self,
        transfer: str,
        stage: str,
        *,
        component: str,
        layers: tuple[int, ...],
        tokens: tuple[int, int],
        src_rank: int,
        expected: int,
        found: int,
        culprit: str,
    ) -> None:
        names = ", ".join(map(str, layers)) if len(layers) <= 8 else f"{layers[0]} to {layers[-1]}"
        text = (
            f"damaged on its way: component {component!r}, layers {names}, tokens [{tokens[0]},{tokens[1]}) from source "
            f"rank {src_rank} of {culprit}: checksum {expected:#018x} was sent, {found:#018x} arrived"
        )
        super().__init__(transfer, stage, text)
        self.component = component
        self.layers = layers
        self.tokens = tokens
        self.src_rank = src_rank
        self.expected = expected
        self.found = found
        self.culprit = culprit
