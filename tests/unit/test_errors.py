"""The error tree: one code for one class, and facts as fields."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rdma_kv import errors
from rdma_kv.errors import (
    ChecksumError,
    ClosedError,
    ConfigError,
    ErrorCode,
    FenceUnsupported,
    IncompatiblePeerError,
    LocalProtocolError,
    PeerError,
    PeerLostError,
    RangeUnavailableError,
    RdmaKvError,
    RegistrationError,
    RemoteProtocolError,
    RouteMismatchError,
    SidecarLostError,
    StagingFull,
    TransferAborted,
    TransferError,
    TransferTimeout,
    TransportError,
)

ABSTRACT = {RdmaKvError, PeerError, TransferError}
EXPECTED = {
    ErrorCode.CONFIG: ConfigError,
    ErrorCode.LOCAL_PROTOCOL: LocalProtocolError,
    ErrorCode.REMOTE_PROTOCOL: RemoteProtocolError,
    ErrorCode.INCOMPATIBLE_PEER: IncompatiblePeerError,
    ErrorCode.PEER_LOST: PeerLostError,
    ErrorCode.TRANSPORT: TransportError,
    ErrorCode.REGISTRATION: RegistrationError,
    ErrorCode.TRANSFER_TIMEOUT: TransferTimeout,
    ErrorCode.TRANSFER_ABORTED: TransferAborted,
    ErrorCode.STAGING_FULL: StagingFull,
    ErrorCode.ROUTE_MISMATCH: RouteMismatchError,
    ErrorCode.RANGE_UNAVAILABLE: RangeUnavailableError,
    ErrorCode.CLOSED: ClosedError,
    ErrorCode.FENCE_UNSUPPORTED: FenceUnsupported,
    ErrorCode.CHECKSUM: ChecksumError,
    ErrorCode.SIDECAR_LOST: SidecarLostError,
}


def family(kind: type[RdmaKvError]) -> Iterator[type[RdmaKvError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from family(child)


def test_code_and_class_map_one_to_one():
    concrete = [kind for kind in family(RdmaKvError) if kind not in ABSTRACT and kind.__module__ == errors.__name__]
    assert {kind.code: kind for kind in concrete} == EXPECTED
    assert len(concrete) == len(EXPECTED) == len(ErrorCode)
    assert all("code" in vars(kind) for kind in concrete), "a code of its own, not its parent's"


def test_codes_never_change_their_numbers():
    assert [code.value for code in ErrorCode] == list(range(1, 17))
    assert [ErrorCode(number).name for number in (1, 4, 8, 12, 14, 15, 16)] == [
        "CONFIG",
        "INCOMPATIBLE_PEER",
        "TRANSFER_TIMEOUT",
        "RANGE_UNAVAILABLE",
        "FENCE_UNSUPPORTED",
        "CHECKSUM",
        "SIDECAR_LOST",
    ]


def test_the_tree():
    assert issubclass(ClosedError, LocalProtocolError)
    for kind in (RemoteProtocolError, IncompatiblePeerError, PeerLostError):
        assert issubclass(kind, PeerError)
    for kind in (RegistrationError, FenceUnsupported):
        assert issubclass(kind, TransportError)
    for kind in (
        TransferTimeout,
        TransferAborted,
        RouteMismatchError,
        RangeUnavailableError,
        StagingFull,
        ChecksumError,
    ):
        assert issubclass(kind, TransferError)


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (ConfigError("tp", "is odd"), {"field": "tp", "problem": "is odd"}),
        (RemoteProtocolError("a/b", "lied"), {"peer": "a/b", "message": "lied"}),
        (IncompatiblePeerError("a/b", "kv.dtype", "int8 there"), {"peer": "a/b", "field": "kv.dtype"}),
        (TransportError("nixl", "NIXL_ERR", "post"), {"backend": "nixl", "status": "NIXL_ERR"}),
        (TransferTimeout("k", "SENDING", "slow"), {"transfer": "k", "stage": "SENDING", "message": "slow"}),
        (
            TransferAborted("k", "SENDING", "no", cause=ErrorCode.CONFIG, culprit="rank 3"),
            {"transfer": "k", "cause": ErrorCode.CONFIG, "culprit": "rank 3"},
        ),
    ],
)
def test_facts_are_fields_and_the_text_says_them(error: RdmaKvError, facts: dict[str, object]):
    for name, value in facts.items():
        assert getattr(error, name) == value
        if name != "cause" and name != "culprit":
            assert str(value) in str(error)


@pytest.mark.parametrize(
    ("layers", "named"), [((7,), "layers 7,"), ((4, 5, 9), "layers 4, 5, 9,"), (tuple(range(3, 40)), "layers 3 to 39,")]
)
def test_a_checksum_error_says_which_chunk_of_whom(layers: tuple[int, ...], named: str):
    error = ChecksumError(
        "k",
        "RECEIVING",
        component="kv",
        layers=layers,
        tokens=(16, 80),
        src_rank=3,
        expected=255,
        found=1,
        culprit="c/p",
    )
    assert (error.component, error.layers, error.tokens, error.src_rank) == ("kv", layers, (16, 80), 3)
    assert (error.expected, error.found, error.culprit, error.transfer) == (255, 1, "c/p", "k")
    for part in ("'kv'", named, "tokens [16,80)", "rank 3 of c/p", "0x00000000000000ff", "0x0000000000000001"):
        assert part in str(error)
    assert "transfer k" not in error.reason


def test_the_reason_leaves_out_whom_it_concerns():
    """It is told to a peer, for whom another name is right."""
    assert RemoteProtocolError("a/b", "lied").reason == "lied"
    assert TransferTimeout("k", "SENDING", "slow").reason == "slow"
    assert IncompatiblePeerError("a/b", "kv.dtype", "int8 there").reason == "kv.dtype: int8 there"
    assert ConfigError("tp", "is odd").reason == "tp: is odd"
    assert LocalProtocolError("push after finish").reason == "push after finish"


def test_the_cause_of_an_abort_is_told_on():
    """So that the last of a chain of agents hears what the first one said."""
    for code in ErrorCode:
        assert TransferAborted("k", "SENDING", "no", cause=code).told_code is code
    for error in (ConfigError("tp", "is odd"), PeerLostError("a/b", "gone"), TransferTimeout("k", "SENDING", "slow")):
        assert error.told_code is error.code


def test_what_may_be_tried_again():
    retryable = {kind for kind in family(RdmaKvError) if kind.retryable and kind.__module__ == errors.__name__}
    assert retryable == {
        PeerLostError,
        SidecarLostError,
        TransportError,
        TransferTimeout,
        TransferAborted,
        StagingFull,
        ChecksumError,
    }
