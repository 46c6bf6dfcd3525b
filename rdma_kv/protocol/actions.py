"""What a machine asks the shell to do. The shell obeys, in order, and reports back what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from rdma_kv.errors import ChecksumError, PeerError, RdmaKvError, TransferAborted
from rdma_kv.messages import Abort, ControlMessage, TransferName, text_field
from rdma_kv.planner import Box, Route
from rdma_kv.slots import SlotRef


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Put a message on the control stream."""

    message: ControlMessage


@dataclass(frozen=True, slots=True)
class Gather:
    """Pack `box` from the source pages into the local slot; then `gathered` or `gather_failed`."""

    slot: SlotRef
    box: Box


@dataclass(frozen=True, slots=True)
class PostWrite:
    """WRITE the box in local slot `slot` into the peer's slot `target`; then `written` or `write_failed`.

    `checksum` goes with it in the notification.
    """

    slot: SlotRef
    target: SlotRef
    box: Box
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class Scatter:
    """Unpack `box` from the local slot into the destination pages; then `scattered` or `scatter_failed`.

    Where there is a `checksum` and the slot's bytes have another, no page is touched; then `scatter_damaged`.
    """

    slot: SlotRef
    box: Box
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class ReleaseSlot:
    """The local slot is proven untouched: back to the pool."""

    slot: SlotRef


@dataclass(frozen=True, slots=True)
class KeepSlot:
    """The local slot is not proven untouched: hold it as unproven until a proof comes."""

    slot: SlotRef


@dataclass(frozen=True, slots=True)
class Listen:
    """Begin (True) or end (False) to progress the transport for this transfer."""

    on: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """The outcome for the caller, once per transfer: its pages are no longer read or written.

    `error` is None for success. Slots may still be held after a failure.
    """

    error: RdmaKvError | None


def abort_message(number: int, key: str, attempt: int, route: Route, error: RdmaKvError) -> Abort:
    """What a participant that gives up tells the others; `number` 0 where the link has no number for the transfer."""
    name = TransferName(key, attempt, route.prefill_replica, route.decode_replica)
    return abort_by_name(name, error, number=number)


def abort_by_name(name: TransferName, error: RdmaKvError, *, number: int = 0, counterpart: str = "") -> Abort:
    """As `abort_message`; `counterpart` for a participant of our own engine, see `Abort`."""
    culprit = error.culprit if isinstance(error, TransferAborted | ChecksumError) else ""
    if isinstance(error, PeerError):
        culprit = error.peer
    return Abort(
        transfer=number,
        key=name.key,
        attempt=name.attempt,
        prefill_replica=name.prefill_replica,
        decode_replica=name.decode_replica,
        code=error.told_code,
        culprit=text_field(culprit),
        message=text_field(error.reason),
        counterpart=counterpart,
    )


Action = SendMessage | Gather | PostWrite | Scatter | ReleaseSlot | KeepSlot | Listen | Finished
