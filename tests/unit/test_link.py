"""The handshake: what a HELLO says, which differences are refused by name on both sides, and how a link ends."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_rig import seeded

from rdma_kv.errors import (
    ClosedError,
    ConfigError,
    ErrorCode,
    IncompatiblePeerError,
    PeerLostError,
    RdmaKvError,
    RemoteProtocolError,
    TransferTimeout,
    TransportError,
)
from rdma_kv.messages import (
    FRAME_HEADER,
    PROTOCOL_VERSION,
    Abort,
    Ack,
    Bye,
    ControlMessage,
    Done,
    Expect,
    Finish,
    Grant,
    Heartbeat,
    Hello,
    Offer,
    Quiesced,
    Regions,
    Reject,
    Release,
    Settle,
    Start,
    decode,
    encode,
)
from rdma_kv.protocol.link import (
    DOUBLE_DIAL,
    Identity,
    Link,
    LinkState,
    Process,
    bye,
    check_compatible,
    choose_transport,
    keeps_dialed,
    read_hello,
)
from rdma_kv.topology import Component, ContextSplit, ModelSpec, TieBreak, Topology
from rdma_kv.types import AgentId, Owned, Role

DEADLINE = 10.0


def model(fingerprint: str = "weights, rope theta 10000", **changes: object) -> ModelSpec:
    """Two components; `changes` go to the first, `kv`."""
    kv = replace(Component("kv", (0, 1, 2, 3), 4, 2, 256), **changes)  # type: ignore[arg-type]
    return ModelSpec((kv, Component("scales", (1, 3), 4, 1, 4, "float32", scale_mode="per token")), fingerprint)


def side(
    role: Role = Role.PREFILL, topology: Topology | None = None, ranks: tuple[int, ...] = (0,), **changes: object
) -> Identity:
    topology = topology or Topology.with_layers(4, tp=2)
    facts = {
        "id": AgentId("c", "p" if role is Role.PREFILL else "d", role, min(ranks)),
        "incarnation": bytes([len(role)] * 16),
        "topology": topology,
        "tie_break": TieBreak.REPLICA,
        "model": model(),
        "page_sizes": (16, 16),
        "owns": topology.owned(sorted(ranks)),
        "transports": ("loopback",),
        "slot_bytes": 1 << 22,
    }
    return Identity(**{**facts, **changes})  # type: ignore[arg-type]


OWN, PEER = side(), side(Role.DECODE)


def wire(message: Hello | Bye) -> Hello | Bye:
    """As it comes out at the other side."""
    return decode("peer", encode(message)[FRAME_HEADER.size :])  # type: ignore[return-value]


def shake(own: Identity, peer: Identity) -> tuple[Link, Link]:
    """Both links after `own` has dialed `peer`; a refusal has been carried over."""
    dialer, acceptor = Link(own, peer.id, DEADLINE), Link(peer, None, DEADLINE)
    answer = acceptor.received(wire(own.hello()))
    dialer.received(wire(answer if answer is not None else peer.hello()))
    return dialer, acceptor


def changed(hello: Hello, **fields: object) -> Hello:
    """A HELLO with some facts replaced, as a peer with a bug would send it."""
    facts = {name: getattr(hello, name) for name in hello.__struct_fields__}
    return Hello(**{**facts, **fields})


# --- what a HELLO says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "identity",
    [
        OWN,
        PEER,
        side(topology=Topology(8, 2, 2, 4, (1, 3), ContextSplit(5)), ranks=(7, 3, 20), tie_break=TieBreak.KEY),
        side(model=ModelSpec.mla(layers=4, fingerprint="é" * 100), page_sizes=(64,)),
        side(model=model(has_tokens=True, scale_mode="per head"), page_sizes=(1, 2)),
        side(checksum="tiled-multilinear-64"),
        side(heartbeat_ms=10, lease_ms=31, process=Process("boot/pid:[1]", 7, 12345)),
    ],
)
def test_a_hello_says_the_whole_identity(identity: Identity):
    hello = wire(identity.hello())
    assert isinstance(hello, Hello)
    assert read_hello("peer", hello) == identity


@seeded
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.sampled_from([0, 1, 3]), st.data()
)
def test_any_hello_comes_back(a: int, dp: int, pp: int, cp: int, interleave: int, data: st.DataObject):
    topology = Topology.with_layers(4, tp=a * dp, pp=pp, cp=cp, dp=dp, cp_split=ContextSplit(interleave))
    ranks = data.draw(st.sets(st.integers(0, topology.num_ranks - 1), min_size=1))
    identity = side(data.draw(st.sampled_from(Role)), topology, tuple(ranks))
    assert read_hello("peer", identity.hello()) == identity


def test_the_name_is_of_one_incarnation():
    again = replace(OWN, incarnation=bytes(16))
    assert OWN.name != again.name
    assert OWN.id == again.id
    assert str(OWN.id) in OWN.name


def test_another_version_is_refused_by_name():
    with pytest.raises(IncompatiblePeerError) as refused:
        read_hello("peer", changed(PEER.hello(), version=PROTOCOL_VERSION + 1))
    assert refused.value.field == "version"


TOPOLOGY = PEER.hello().topology
COMPONENTS = PEER.hello().components


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "router"},
        {"tie_break": "random"},
        {"rank": 1},
        {"owns": [(1, 0)]},
        {"owns": [(0, 2)]},
        {"owns": [(0, 0), (0, 0)]},
        {"owns": [(0, 1), (0, 0)], "rank": 1},
        {"owns": [(0, 1)]},
        {"slot_bytes": 0},
        {"transports": ["ucx", "nixl", "ucx"]},
        {"transports": ["ucx"], "device_transports": ["nixl"]},
        {"heartbeat_ms": 2000, "lease_ms": 6000},
        {"topology": msgspec.structs.replace(TOPOLOGY, tp=0)},
        {"topology": msgspec.structs.replace(TOPOLOGY, tp=1 << 30)},
        {"topology": msgspec.structs.replace(TOPOLOGY, dp=4)},
        {"topology": msgspec.structs.replace(TOPOLOGY, pp=2)},
        {"topology": msgspec.structs.replace(TOPOLOGY, layers_per_stage=[0])},
        {"topology": msgspec.structs.replace(TOPOLOGY, layers_per_stage=[1 << 30])},
        {"topology": msgspec.structs.replace(TOPOLOGY, cp_split="zigzag")},
        {"components": [COMPONENTS[0], COMPONENTS[0]]},
        *(
            {"components": [msgspec.structs.replace(COMPONENTS[0], **change), COMPONENTS[1]]}
            for change in (
                {"layers": []},
                {"layers": [1, 0]},
                {"layers": [0, 0]},
                {"kv_heads": 0},
                {"kv_heads": 1 << 20},
                {"kv_factor": 0},
                {"row_bytes": 0},
                {"replicated": True},
                {"page_size": 0},
            )
        ),
    ],
)
def test_a_hello_that_contradicts_itself_is_the_peers_error(fields: dict[str, object]):
    link = Link(OWN, None, DEADLINE)
    answer = link.received(changed(PEER.hello(), **fields))
    assert isinstance(link.error, RemoteProtocolError)
    assert "contradicts itself" in str(link.error)
    assert answer is not None
    assert answer.code is ErrorCode.REMOTE_PROTOCOL
    assert link.state is LinkState.CLOSED


# --- compatibility -----------------------------------------------------------------------------------------------------

REFUSED = [
    ("cluster", {"id": AgentId("other", "d", Role.DECODE, 0)}),
    ("transport", {"transports": ("nixl", "ucx")}),
    ("fingerprint", {"model": model("weights, rope theta 500000")}),
    ("kv.row_bytes", {"model": model(row_bytes=128)}),
    ("kv.dtype", {"model": model(dtype="float8_e4m3")}),
    ("kv.kv_factor", {"model": model(kv_factor=1)}),
    ("kv.layers", {"model": model(layers=(0, 1, 2))}),
    ("kv.kv_heads", {"model": model(kv_heads=8)}),
    ("kv.scale_mode", {"model": model(scale_mode="per head")}),
    ("kv.has_tokens", {"model": model(has_tokens=False)}),
    ("kv.kv_heads", {"model": model(kv_heads=1, replicated=True)}),
    ("components", {"model": ModelSpec(model().components[:1], model().fingerprint), "page_sizes": (16,)}),
    ("components", {"model": ModelSpec(model().components[::-1], model().fingerprint)}),
    ("checksum", {"checksum": "tiled-multilinear-64"}),
    ("layers_per_stage", {"topology": Topology.with_layers(5, tp=2)}),
    ("layers_per_stage", {"topology": Topology.with_layers(3, tp=2)}),
]


@pytest.mark.parametrize(("field", "changes"), REFUSED, ids=[f"{n} {field}" for n, (field, _) in enumerate(REFUSED)])
@pytest.mark.parametrize("dialed_by", ["us", "the other"])
def test_r05_a_difference_is_refused_by_name_on_both_sides(field: str, changes: dict[str, object], dialed_by: str):
    """Only the peer differs; whoever sees it first tells the other, which ends with the same class and field."""
    other = replace(PEER, **changes)  # type: ignore[arg-type]
    links = shake(OWN, other) if dialed_by == "us" else shake(other, OWN)
    for link in links:
        assert link.state is LinkState.CLOSED
        assert isinstance(link.error, IncompatiblePeerError)
        assert link.error.field == field
        assert link.error.peer


OFFERS = st.lists(st.sampled_from("abcde"), min_size=1, max_size=5, unique=True).map(tuple)


@seeded
@given(OFFERS, OFFERS)
def test_both_sides_choose_the_same_transport(prefill: tuple[str, ...], decode_: tuple[str, ...]):
    """The first of the prefill side's list that decode has too, whoever dials."""
    one, other = side(transports=prefill), side(Role.DECODE, transports=decode_)
    common = [name for name in prefill if name in decode_]
    for links in (shake(one, other), shake(other, one)):
        if common:
            assert [link.state for link in links] == [LinkState.UP] * 2
            assert [link.transport for link in links] == common[:1] * 2
        else:
            assert [link.state for link in links] == [LinkState.CLOSED] * 2
            assert [link.error.field for link in links] == ["transport"] * 2  # type: ignore[union-attr]


def test_both_sides_must_use_the_same_checksum():
    one, other = side(checksum="sum-1"), side(Role.DECODE, checksum="sum-1")
    assert [link.state for link in shake(one, other)] == [LinkState.UP] * 2
    for link in (*shake(one, PEER), *shake(PEER, one), *shake(one, replace(other, checksum="sum-2"))):
        assert isinstance(link.error, IncompatiblePeerError)
        assert link.error.field == "checksum"
        assert "AgentConfig.checksum" in str(link.error)


def test_the_prefill_sides_order_decides():
    one, other = side(transports=("nixl", "ucx")), side(Role.DECODE, transports=("ucx", "nixl"))
    assert choose_transport(one, other) == choose_transport(other, one) == "nixl"
    assert choose_transport(replace(one, transports=("ucx", "nixl")), other) == "ucx"


ON_ONE_HOST = {"process": Process("host", 1, 1)}
BESIDE = {"process": Process("host", 2, 1)}
BOTH = {"transports": ("ucx", "nixl"), "device_transports": ("ucx", "nixl"), "device_lanes": ("cuda_ipc",)}


@pytest.mark.parametrize(
    ("prefill", "decode_", "transport", "lane"),
    [
        (BOTH, BOTH, "ucx", "cuda_ipc"),
        (
            BOTH,
            {**BOTH, "device_transports": ("nixl",)},
            "nixl",
            "cuda_ipc",
        ),  # before one that would go through the hosts
        (BOTH, {**BOTH, "device_transports": ()}, "ucx", ""),
        (BOTH, {"transports": ("nixl",)}, "nixl", ""),  # an agent without a GPU
        (BOTH, {**BOTH, "device_lanes": ()}, "ucx", ""),
        (BOTH, {**BOTH, "device_lanes": ("rdma",)}, "ucx", ""),
        (BOTH, {**BOTH, "process": Process("another host", 1, 1)}, "ucx", ""),
        (
            {**BOTH, "device_lanes": ("cuda_ipc", "rdma")},
            {**BOTH, "device_lanes": ("rdma",), "process": Process("another host", 1, 1)},
            "ucx",
            "rdma",
        ),
        (
            {**BOTH, "device_lanes": ("cuda_ipc", "rdma")},
            {**BOTH, "device_lanes": ("rdma", "cuda_ipc")},
            "ucx",
            "cuda_ipc",  # of both the faster one
        ),
        ({**BOTH, "process": Process()}, {**BOTH, "process": Process()}, "ucx", ""),  # hosts that are not known
        (BOTH, {**BOTH, **ON_ONE_HOST}, "ucx", ""),  # one process, within which there is no cuda_ipc
    ],
)
def test_both_sides_choose_the_same_staging(prefill, decode_, transport: str, lane: str):
    links = shake(side(**{**ON_ONE_HOST, **prefill}), side(Role.DECODE, **{**BESIDE, **decode_}))
    assert [link.transport for link in links] == [transport] * 2
    assert [link.device_lane for link in links] == [lane] * 2


@pytest.mark.parametrize("dialed_by", ["prefill", "decode"])
def test_no_common_transport_names_both_lists_and_the_fix_on_both_sides(dialed_by: str):
    one, other = side(transports=("ucx",)), side(Role.DECODE, transports=("nixl", "loopback"))
    for link in shake(one, other) if dialed_by == "prefill" else shake(other, one):
        assert isinstance(link.error, IncompatiblePeerError)
        assert link.error.field == "transport"
        assert "prefill has 'ucx', decode has 'nixl', 'loopback'" in str(link.error)
        assert "auto" in str(link.error)


def test_a_refusal_of_long_names_still_fits_into_a_message():
    many = tuple(letter * 256 for letter in "abcdefgh")
    dialer, acceptor = shake(side(transports=many), side(Role.DECODE, transports=("ucx",)))
    assert [link.error.field for link in (dialer, acceptor)] == ["transport"] * 2  # type: ignore[union-attr]


def test_r05_head_dim():
    """head_dim 64 there, 128 here, in 16 bits: the row's bytes differ."""
    here, there = (ModelSpec.gqa(layers=4, kv_heads=4, head_dim=dim) for dim in (128, 64))
    links = shake(side(model=here, page_sizes=(16,)), side(Role.DECODE, model=there, page_sizes=(16,)))
    assert [link.error.field for link in links] == ["kv.row_bytes"] * 2  # type: ignore[union-attr]
    assert all("128" in str(link.error) and "256" in str(link.error) for link in links)


def test_opaque_pages_must_hold_the_same_tokens():
    """Page sizes may differ, except where nobody can look into a page."""
    here, there = (model(kv_factor=1, kv_heads=2, opaque_page_tokens=tokens) for tokens in (16, 32))
    links = shake(side(model=here), side(Role.DECODE, model=there))
    assert [link.error.field for link in links] == ["kv.opaque_page_tokens"] * 2  # type: ignore[union-attr]
    again = side(Role.DECODE, model=here, page_sizes=(1, 64))
    assert [link.state for link in shake(side(model=here), again)] == [LinkState.UP] * 2


def test_a_latent_does_not_meet_heads():
    latent = ModelSpec((Component("kv", (0, 1, 2, 3), 1, 2, 256, replicated=True),), "m")
    heads = ModelSpec((Component("kv", (0, 1, 2, 3), 1, 2, 256),), "m")
    links = shake(side(model=latent, page_sizes=(16,)), side(Role.DECODE, model=heads, page_sizes=(16,)))
    assert [link.error.field for link in links] == ["kv.replicated"] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize(("p", "d"), [(3, 2), (2, 3), (6, 4)])
def test_r13_attention_tp_that_does_not_divide_is_refused_on_both_sides(p: int, d: int):
    """12 heads divide by both, so only the pair cannot be."""
    for first, second in ((p, d), (d, p)):
        spec = ModelSpec.gqa(layers=4, kv_heads=12, head_dim=8)
        one = side(topology=Topology.with_layers(4, tp=first), model=spec, page_sizes=(16,))
        other = side(Role.DECODE, Topology.with_layers(4, tp=second), model=spec, page_sizes=(16,))
        for link in (*shake(one, other), *shake(other, one)):
            assert isinstance(link.error, IncompatiblePeerError)
            assert link.error.field == "tp"


def test_heads_that_do_not_divide_over_the_ranks_are_refused_by_name():
    spec = ModelSpec.gqa(layers=4, kv_heads=4, head_dim=8)
    one = side(topology=Topology.with_layers(4, tp=3), model=spec, page_sizes=(16,))
    other = side(Role.DECODE, Topology.with_layers(4, tp=3), model=spec, page_sizes=(16,))
    assert [link.error.field for link in shake(one, other)] == ["kv_heads"] * 2  # type: ignore[union-attr]


def test_a_state_without_tokens_needs_equal_attention_tp():
    state = ModelSpec((Component("state", (0, 1), 4, 1, 64, has_tokens=False),), "m")
    one = side(topology=Topology.with_layers(4, tp=2), model=state, page_sizes=(1,))
    other = side(Role.DECODE, Topology.with_layers(4, tp=4), model=state, page_sizes=(1,))
    assert [link.error.field for link in shake(one, other)] == ["component state"] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("role", Role)
def test_two_of_one_role_do_not_meet(role: Role):
    one = side(role)
    other = replace(side(role), id=AgentId("c", "another", role, 0))
    assert [link.error.field for link in shake(one, other)] == ["role"] * 2  # type: ignore[union-attr]


def sibling(role: Role, **changes: object) -> Identity:
    """Another agent of the same engine as `side(role)`."""
    return side(role, ranks=(1,), **changes)


@pytest.mark.parametrize("role", Role)
def test_two_agents_of_one_engine_have_a_link_for_control_only(role: Role):
    """What KV would need is of no matter there: transports, page sizes, slots."""
    one, other = side(role), sibling(role, transports=("ucx",), page_sizes=(1, 1), slot_bytes=1, checksum="other")
    for links in (shake(one, other), shake(other, one)):
        assert [link.state for link in links] == [LinkState.UP] * 2
        assert all(link.control_only for link in links)
        assert [link.transport for link in links] == ["", ""]
    for link in shake(OWN, PEER):
        assert not link.control_only
        assert link.transport == "loopback"


@pytest.mark.parametrize("dialed_by", ["us", "the other"])
@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("cluster", {"id": AgentId("other", "p", Role.PREFILL, 1)}),
        ("role", {"id": AgentId("c", "p2", Role.PREFILL, 1)}),
        ("identity", {"id": AgentId("c", "p", Role.PREFILL, 0), "owns": (Owned(0, 0),)}),
        ("topology", {"topology": Topology.with_layers(4, tp=2, pp=2)}),
        ("tie_break", {"tie_break": TieBreak.KEY}),
    ],
)
def test_agents_that_see_another_engine_are_refused_by_name(field: str, changes: dict[str, object], dialed_by: str):
    one, other = side(), replace(sibling(Role.PREFILL), **changes)  # type: ignore[arg-type]
    for link in shake(one, other) if dialed_by == "us" else shake(other, one):
        assert link.state is LinkState.CLOSED
        assert isinstance(link.error, IncompatiblePeerError)
        assert link.error.field == field


def abort(transfer: int) -> Abort:
    return Abort(transfer, "k", 0, 0, 0, ErrorCode.CLOSED, "", "why", "d")


@pytest.mark.parametrize("message", [abort(0), Heartbeat(1, 0), Heartbeat(1, 0, True)], ids=repr)
def test_a_link_for_control_carries_aborts_by_name_and_heartbeats(message: ControlMessage):
    dialer, acceptor = shake(side(), sibling(Role.PREFILL))
    for link in (dialer, acceptor):
        assert link.received(message) is None
        assert link.state is LinkState.UP
    assert dialer.received(bye(ClosedError("closing"))) is None
    assert dialer.state is LinkState.CLOSED


ID = bytes(16)
KV_MESSAGES = [
    Regions([(4096, 1, 0)], 1, b""),
    Expect("k", 0, 0, 0, ID, [], 1),
    Offer(1, "k", 0, 0, 0, ID, [], 0, 1),
    Grant(1, [], []),
    Reject(0, ErrorCode.CONFIG, ""),
    Release(1, []),
    Start(1),
    Ack(1, 0, 1),
    Finish(1, 0, {}),
    Done(1),
    abort(1),
    Quiesced(1),
    Settle(),
]


@pytest.mark.parametrize("message", KV_MESSAGES, ids=lambda message: type(message).__name__)
def test_anything_else_on_a_link_for_control_is_the_peers_error(message: ControlMessage):
    for link in shake(side(), sibling(Role.PREFILL)):
        answer = link.received(message)
        assert answer is not None
        assert answer.code is ErrorCode.REMOTE_PROTOCOL
        assert isinstance(link.error, RemoteProtocolError)
        assert f"{type(message).__name__} on a link between two agents of one engine" in str(link.error)
        assert link.state is LinkState.CLOSED
    for link in shake(OWN, PEER):  # the control: where KV goes it is welcome
        assert link.received(message) is None
        assert link.state is LinkState.UP


def test_every_kind_of_message_is_either_control_or_not():
    assert {type(message) for message in KV_MESSAGES} | {Hello, Heartbeat, Bye} == set(ControlMessage.__args__)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"page_sizes": (64, 1)},
        {"topology": Topology.with_layers(4, tp=1)},
        {"topology": Topology.with_layers(4, tp=4)},
        {"topology": Topology.with_layers(4, tp=2, pp=4)},
        {"topology": Topology.with_layers(4, tp=8, dp=8)},
        {"topology": Topology.with_layers(4, tp=8, dp=2)},
        {"topology": Topology.with_layers(4, tp=2, cp=2, cp_split=ContextSplit(16))},
        {"topology": Topology(2, 2, 1, 1, (1, 3))},
        {"slot_bytes": 4096},
        {"tie_break": TieBreak.KEY},
    ],
)
def test_layouts_and_parallel_sizes_may_differ(changes: dict[str, object]):
    topology = changes.get("topology", PEER.topology)
    assert isinstance(topology, Topology)
    other = replace(PEER, **{**changes, "owns": topology.owned([0])})  # type: ignore[arg-type]
    for one, two in ((OWN, other), (other, OWN)):
        dialer, acceptor = shake(one, two)
        assert dialer.state is acceptor.state is LinkState.UP
        assert dialer.error is acceptor.error is None
        assert (dialer.remote, acceptor.remote) == (two, one)
        assert dialer.deadline is acceptor.deadline is None


@pytest.mark.parametrize("changes", [changes for _, changes in REFUSED])
def test_compatibility_is_symmetric(changes: dict[str, object]):
    other = replace(PEER, **changes)  # type: ignore[arg-type]
    fields = []
    for own, remote in ((OWN, other), (other, OWN)):
        with pytest.raises(IncompatiblePeerError) as refused:
            check_compatible(own, remote)
        fields.append(refused.value.field)
    assert fields[0] == fields[1]


def test_who_answers_must_be_whom_we_dialed():
    """R16: several replicas on one host: a port that was mixed up is noticed, not used."""
    link = Link(OWN, AgentId("c", "d", Role.DECODE, 1), DEADLINE)
    answer = link.received(PEER.hello())
    assert isinstance(link.error, IncompatiblePeerError)
    assert link.error.field == "identity"
    assert answer is not None
    assert answer.field == "identity"


# --- how a link ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "field"),
    [
        (IncompatiblePeerError("us", "kv.dtype", "differs"), IncompatiblePeerError, "kv.dtype"),
        (ConfigError("tp", "is odd"), IncompatiblePeerError, "tp"),
        (RemoteProtocolError("us", "lied"), RemoteProtocolError, None),
        (PeerLostError("us", DOUBLE_DIAL), PeerLostError, None),
        (ClosedError("closing"), PeerLostError, None),
        (TransportError("nixl", "ERR", "broke"), PeerLostError, None),
        (TransferTimeout("k", "UP", "late"), PeerLostError, None),
    ],
)
def test_a_bye_comes_out_as_an_error_with_its_reason(error: RdmaKvError, kind: type[RdmaKvError], field: str | None):
    for up in (False, True):
        link = Link(OWN, PEER.id, DEADLINE)
        if up:
            link.received(PEER.hello())
        message = wire(bye(error))
        assert isinstance(message, Bye)
        assert message.code is error.code
        assert link.received(message) is None
        assert type(link.error) is kind
        assert link.error.peer == str(PEER.id)  # type: ignore[attr-defined]
        assert error.reason in str(link.error)
        assert getattr(link.error, "field", None) == field
        assert link.state is LinkState.CLOSED
        assert link.deadline is None


def test_a_bye_of_any_error_can_be_written():
    message = wire(bye(ConfigError("x" * 5000, "\udcff" * 5000)))
    assert isinstance(message, Bye)
    assert (len(message.field), len(message.message)) == (2048, 2048)


def test_a_message_before_hello_is_the_peers_error():
    link = Link(OWN, None, DEADLINE)
    answer = link.received(Start(1))
    assert answer is not None
    assert answer.code is ErrorCode.REMOTE_PROTOCOL
    assert isinstance(link.error, RemoteProtocolError)
    assert "Start before HELLO" in str(link.error)
    assert link.state is LinkState.CLOSED


def test_a_second_hello_is_the_peers_error():
    link = Link(OWN, None, DEADLINE)
    assert link.received(PEER.hello()) is None
    assert link.received(Start(1)) is None
    answer = link.received(PEER.hello())
    assert answer is not None
    assert answer.code is ErrorCode.REMOTE_PROTOCOL
    assert isinstance(link.error, RemoteProtocolError)
    assert link.state is LinkState.CLOSED


@pytest.mark.parametrize("up", [False, True])
def test_what_the_shell_refuses_is_closed(up: bool):
    """The registry or a double dial is known only after HELLO; a link that was refused must not look alive."""
    link = Link(OWN, None, DEADLINE)
    if up:
        link.received(PEER.hello())
    error = IncompatiblePeerError("us", "ranks", "HELLO says (0,), the registry (1,)")
    answer = link.refuse(error)
    assert (answer.code, answer.field) == (ErrorCode.INCOMPATIBLE_PEER, "ranks")
    assert link.state is LinkState.CLOSED
    assert link.error is error
    assert link.deadline is None


def test_a41_no_hello_in_time():
    link = Link(OWN, PEER.id, DEADLINE)
    assert link.deadline == DEADLINE
    assert not link.tick(DEADLINE - 0.001)
    assert link.state is LinkState.GREETING
    assert link.tick(DEADLINE)
    assert link.state is LinkState.CLOSED
    assert isinstance(link.error, PeerLostError)
    assert "no HELLO in time" in str(link.error)
    assert not link.tick(DEADLINE + 1)


def test_the_handshake_deadline_is_over_when_the_link_is_up():
    link = Link(OWN, PEER.id, DEADLINE)
    link.received(PEER.hello())
    assert not link.tick(1e9)
    assert link.state is LinkState.UP


@pytest.mark.parametrize("up", [False, True])
def test_the_first_reason_of_an_end_counts(up: bool):
    link = Link(OWN, None, DEADLINE)
    if up:
        link.received(PEER.hello())
    link.lost()
    error = link.error
    assert isinstance(error, PeerLostError)
    link.lost(RemoteProtocolError("peer", "later"))
    link.refuse(ClosedError("later"))
    assert not link.tick(1e9)
    for message in (PEER.hello(), Start(1), bye(ClosedError("later"))):
        assert link.received(message) is None
    assert link.error is error
    assert link.state is LinkState.CLOSED


def test_an_end_may_have_a_reason_of_its_own():
    link = Link(OWN, None, DEADLINE)
    error = RemoteProtocolError("peer", "an unreadable frame")
    link.lost(error)
    assert link.error is error


# --- liveness ----------------------------------------------------------------------------------------------------------


def test_both_sides_beat_at_the_smaller_interval_and_keep_their_own_leases():
    one = side(heartbeat_ms=2000, lease_ms=10_000)
    other = side(Role.DECODE, heartbeat_ms=500, lease_ms=1600)
    lives = [link.liveness(0.0, 0.0) for link in shake(one, other)]
    assert [life.heartbeat_s for life in lives] == [0.5, 0.5]
    assert [life.lease_s for life in lives] == [10.0, 1.6]
    for life, peer_lease_s in zip(lives, (1.6, 10.0), strict=True):  # each posts by the other's lease
        assert life.may_post(0.9 * peer_lease_s - 0.001)
        assert not life.may_post(0.9 * peer_lease_s)


# --- double dial -------------------------------------------------------------------------------------------------------

ids = st.builds(AgentId, st.just("c"), st.sampled_from(["a", "a1", "b"]), st.sampled_from(Role), st.integers(0, 20))


@seeded
@given(ids, ids)
def test_on_a_double_dial_both_sides_keep_the_same_connection(one: AgentId, other: AgentId):
    if one == other:
        assert not keeps_dialed(one, other)
    else:
        assert keeps_dialed(one, other) != keeps_dialed(other, one)


def test_the_smaller_identity_keeps_what_it_dialed():
    small, large = AgentId("c", "a", Role.DECODE, 9), AgentId("c", "a", Role.DECODE, 10)
    assert keeps_dialed(small, large)
    assert not keeps_dialed(large, small)


def test_owned_ranks_are_told_with_their_replicas():
    identity = side(topology=Topology.with_layers(4, tp=4, dp=2), ranks=(1, 2))
    assert identity.owns == (Owned(0, 1), Owned(1, 2))
    assert identity.hello().owns == [(0, 1), (1, 2)]
    assert identity.ranks == {1, 2}
