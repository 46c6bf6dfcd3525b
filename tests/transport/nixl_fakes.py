"""NIXL's Python wrapper as the owner thread sees it, under the tests' control: what it is told, and how it fails."""

from __future__ import annotations

import contextlib

import numpy as np

from rdma_kv.errors import DEVICE_MEMORY, RegistrationError
from rdma_kv.transport.nixl_owner import Nixl


class nixlRemoteDisconnectError(Exception):  # noqa: N801 - NIXL's own name, from which the status is made
    pass


class nixlBackendError(Exception):  # noqa: N801
    pass


class Descriptors:
    """A list of NIXL's. `memory`: its kind, and the set of device numbers in it."""

    def __init__(self, table, kind):
        self.table = table
        self.memory = (kind, {int(number) for number in table[:, 2]})


class FakeHandle:
    def __init__(self, pieces, notification, memory):
        self.pieces = pieces
        self.notification = notification
        self.memory = memory
        self.state = "made"
        self.released = 0

    def release(self):
        self.released += 1


class Native:
    """What the wrapper wraps: a fence sees it die."""


class FakeAgent:
    """NIXL's wrapper as the owner thread sees it. `failing` maps a method's name to the errors of its next calls.

    `on_call` is told the name of each method that reaches into UCX.
    """

    def __init__(self, name="us", settings=None, on_call=lambda method: None):
        self.name = name
        self.settings = settings
        self.on_call = on_call
        self.backends = {"UCX": 1}
        self.agent = Native()
        self.failing: dict[str, list[Exception | None]] = {}
        self.handles: list[FakeHandle] = []
        self.registered = []
        self.kinds = {}
        self.notifications = {}

    def _fail(self, method):
        self.on_call(method)
        errors = self.failing.get(method)
        if errors and (error := errors.pop(0)) is not None:
            raise error

    def get_agent_metadata(self):
        return self.name.encode()

    def register_memory(self, entries, mem_type):
        self._fail("register_memory")
        self.registered += entries
        self.kinds.update({entry[0]: (mem_type, entry[2]) for entry in entries})
        return entries[0]

    def deregister_memory(self, entry):
        self._fail("deregister_memory")
        self.registered.remove(entry)

    def add_remote_agent(self, blob):
        self._fail("add_remote_agent")
        return blob

    def make_connection(self, name):
        assert isinstance(name, str)

    def get_xfer_descs(self, table, mem_type):
        assert table.dtype == np.uint64
        return Descriptors(table, mem_type)

    def initialize_xfer(self, operation, local, remote, name, notification):
        self._fail("initialize_xfer")
        assert operation == "WRITE"
        assert (local.table[:, 1] == remote.table[:, 1]).all()
        pieces = list(zip(local.table[:, 0], remote.table[:, 0], local.table[:, 1], strict=True))
        return FakeHandle(pieces, notification, (local.memory, remote.memory))

    def transfer(self, handle):
        handle.state = "PROC"
        self.handles.append(handle)
        self._fail("transfer")
        return "PROC"

    def check_xfer_state(self, handle):
        self.on_call("check_xfer_state")
        if isinstance(handle.state, Exception):
            raise type(handle.state)(*handle.state.args)  # a new one, as NIXL's: an old one keeps the frames it passed
        return handle.state

    def get_new_notifs(self):
        self._fail("get_new_notifs")
        found, self.notifications = self.notifications, {}
        return found

    def finish(self, *places):
        for place in places:
            self.handles[place].state = "DONE"


class FakeNixl(Nixl):
    """Makes `FakeAgent`s."""

    def __init__(self, prepare=lambda agent: None, on_call=lambda method: None):
        super().__init__(None, (nixlRemoteDisconnectError, nixlBackendError))
        object.__setattr__(self, "made", [])
        object.__setattr__(self, "prepare", prepare)
        object.__setattr__(self, "on_call", on_call)

    def make_agent(self, name, settings=None):
        self.on_call("make_agent")
        agent = FakeAgent(name, settings, self.on_call)
        self.prepare(agent)
        self.made.append(agent)
        return agent


class Outcome:
    """Records how one operation was settled."""

    def __init__(self):
        self.results = []
        self.on_result = lambda: None

    def __call__(self, error):
        self.on_result()
        self.results.append(error)

    @property
    def error(self):
        assert len(self.results) == 1
        return self.results[0]


class FakeCuda:
    """`rdma_kv.cuda.Cuda` of a machine with two GPUs. `current_now` holds the ordinals whose contexts are pushed."""

    def __init__(self):
        self.current_now = []
        self.retained = set()
        self.synchronized = []
        self.closed = False
        self.failing = None
        self.on_synchronize = lambda: None

    def retain(self, ordinal):
        if ordinal > 1:
            raise RegistrationError("cuda", DEVICE_MEMORY, "this process sees 2 GPUs")
        self.retained.add(ordinal)

    @contextlib.contextmanager
    def current(self, ordinal):
        assert ordinal in self.retained
        self.current_now.append(ordinal)
        try:
            yield
        finally:
            assert self.current_now.pop() == ordinal

    def check_memory(self, address, length_bytes, ordinal, *, exported):
        assert self.current_now[-1] == ordinal

    def synchronize(self, ordinal):
        self.on_synchronize()
        if self.failing is not None:
            raise self.failing
        self.synchronized.append(ordinal)

    def close(self):
        assert not self.current_now
        self.closed = True
