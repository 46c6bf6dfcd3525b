"""libucp through cffi, without a compiler: the C declarations we need, and one typed method per call.

All that is untyped (cffi's pointers, its buffers) stays in this module; others hold them as opaque handles.

Traps of the ABI. `ucs_status_t` is a packed enum, one signed byte. A status pointer is null (done), a request, or an
error from 2^64 - 100 up; here it is a number, and so is a local address, since making cffi's pointers costs as much as a
put. Structures are read only as far as their field mask says, so that older and newer libraries may have fewer or more
fields. RMA needs no C callback (requests are polled); active messages and error handlers do, and cffi frees a callback
with its last Python reference: `Worker` and `Link` objects must keep theirs.

The one map from UCX's errors to ours is `Ucx.check`.

Source: src/ucp/api/ucp.h, src/ucp/api/ucp_def.h and src/ucs/type/status.h of UCX 1.22.
"""

from __future__ import annotations

import enum
import importlib
import re
from collections.abc import Callable
from typing import Any, Final, NewType, TypeAlias

from rdma_kv.errors import ConfigError, RegistrationError, TransportError

BACKEND: Final = "ucx"

CData: TypeAlias = Any
"""Something of cffi's."""

Handle = NewType("Handle", object)
"""A pointer of UCX's: context, worker, endpoint, memory or rkey. Opaque outside of this module."""

Request = NewType("Request", int)
"""An operation in progress. Ask `Ucx.outcome` until it is over, which frees it."""

_CDEF: Final = """
typedef signed char ucs_status_t;
typedef uintptr_t ucs_status_ptr_t;
typedef struct { uint64_t field_mask; uint64_t features; size_t request_size; void *request_init; void *request_cleanup;
    uint64_t tag_sender_mask; int mt_workers_shared; size_t estimated_num_eps; size_t estimated_num_ppn;
    const char *name; size_t node_local_id; } ucp_params_t;
typedef struct { uint64_t field_mask; int thread_mode; uint64_t cpu_mask[16]; unsigned events; void *user_data;
    int event_fd; uint64_t flags; const char *name; size_t am_alignment; uint64_t client_id; } ucp_worker_params_t;
typedef void (*ucp_err_handler_cb_t)(void *arg, void *ep, ucs_status_t status);
typedef struct { ucp_err_handler_cb_t cb; void *arg; } ucp_err_handler_t;
typedef struct { const void *addr; uint32_t addrlen; } ucs_sock_addr_t;
typedef struct { uint64_t field_mask; const void *address; int err_mode; ucp_err_handler_t err_handler; void *user_data;
    unsigned flags; ucs_sock_addr_t sockaddr; void *conn_request; const char *name;
    ucs_sock_addr_t local_sockaddr; } ucp_ep_params_t;
typedef struct { uint64_t field_mask; void *address; size_t length; unsigned flags; unsigned prot; int memory_type;
    const void *exported_memh_buffer; } ucp_mem_map_params_t;
typedef struct { uint32_t op_attr_mask; uint32_t flags; void *request; void *cb; uint64_t datatype; void *user_data;
    void *reply_buffer; int memory_type; void *recv_info; void *memh; uint64_t remote_datatype; const void *remote;
    size_t remote_count; } ucp_request_param_t;
typedef ucs_status_t (*ucp_am_recv_callback_t)(void *arg, const void *header, size_t header_length, void *data,
    size_t length, const void *param);
typedef struct { uint64_t field_mask; unsigned id; uint32_t flags; ucp_am_recv_callback_t cb;
    void *arg; } ucp_am_handler_param_t;
typedef struct { const char *transport_name; const char *device_name; } ucp_transport_entry_t;
typedef struct { ucp_transport_entry_t *entries; unsigned num_entries; size_t entry_size; } ucp_transports_t;
typedef struct { uint64_t field_mask; char name[32]; char local_sockaddr[128]; char remote_sockaddr[128];
    ucp_transports_t transports; void *user_data; } ucp_ep_attr_t;
typedef struct { uint64_t field_mask; size_t request_size; int thread_mode; uint64_t memory_types; char name[32];
    size_t device_counter_size; } ucp_context_attr_t;
const char *ucs_status_string(ucs_status_t status);
void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release);
ucs_status_t ucp_config_read(const char *prefix, const char *filename, void **config);
ucs_status_t ucp_config_modify(void *config, const char *name, const char *value);
void ucp_config_release(void *config);
ucs_status_t ucp_init_version(unsigned major, unsigned minor, const ucp_params_t *params, const void *config,
    void **context);
void ucp_cleanup(void *context);
ucs_status_t ucp_context_query(void *context, ucp_context_attr_t *attr);
ucs_status_t ucp_mem_map(void *context, const ucp_mem_map_params_t *params, void **memh);
ucs_status_t ucp_mem_unmap(void *context, void *memh);
ucs_status_t ucp_rkey_pack(void *context, void *memh, void **buffer, size_t *size);
void ucp_rkey_buffer_release(void *buffer);
ucs_status_t ucp_worker_create(void *context, const ucp_worker_params_t *params, void **worker);
void ucp_worker_destroy(void *worker);
ucs_status_t ucp_worker_get_address(void *worker, void **address, size_t *length);
void ucp_worker_release_address(void *worker, void *address);
ucs_status_t ucp_worker_get_efd(void *worker, int *fd);
ucs_status_t ucp_worker_arm(void *worker);
unsigned ucp_worker_progress(void *worker);
ucs_status_t ucp_worker_set_am_recv_handler(void *worker, const ucp_am_handler_param_t *param);
ucs_status_t ucp_ep_create(void *worker, const ucp_ep_params_t *params, void **ep);
ucs_status_ptr_t ucp_ep_close_nbx(void *ep, const ucp_request_param_t *param);
ucs_status_ptr_t ucp_ep_flush_nbx(void *ep, const ucp_request_param_t *param);
ucs_status_t ucp_ep_query(void *ep, ucp_ep_attr_t *attr);
ucs_status_t ucp_ep_rkey_unpack(void *ep, const void *buffer, void **rkey);
void ucp_rkey_destroy(void *rkey);
ucs_status_ptr_t ucp_put_nbx(void *ep, uintptr_t buffer, size_t count, uint64_t remote, void *rkey,
    const ucp_request_param_t *param);
ucs_status_ptr_t ucp_am_send_nbx(void *ep, unsigned id, const void *header, size_t header_length, const void *buffer,
    size_t count, const ucp_request_param_t *param);
ucs_status_t ucp_request_check_status(uintptr_t request);
void ucp_request_free(uintptr_t request);
"""

_FUNCTIONS: Final = tuple(dict.fromkeys(re.findall(r"\b(uc[ps]_\w+)\(", _CDEF)))

_INPROGRESS: Final = 1
_FIRST_ERROR: Final = 2**64 - 100  # UCS_ERR_LAST as a pointer; from here up it is an error
_ERR_BUSY: Final = -15

_FEATURES: Final = 1 << 1 | 1 << 4 | 1 << 6  # RMA, WAKEUP, AM
_EVENTS: Final = 1 << 0 | 1 << 10 | 1 << 11  # RMA, TX, RX
_LOCAL_READ, _LOCAL_WRITE, _REMOTE_WRITE = 1 << 0, 1 << 1, 1 << 9
_AM_WHOLE_MESSAGE: Final = 1
_AM_EAGER_COPIED_HEADER: Final = 1 << 1 | 1 << 3
_FIELD_FLAGS, _FIELD_MEMH = 1 << 4, 1 << 8
_CLOSE_FORCE: Final = 1
_ERROR_MODE_PEER: Final = 1
_THREADS_SERIALIZED: Final = 1
_MOST_LANES: Final = 64  # UCX's own limit on lanes of one endpoint
_IGNORE_REQUEST_LEAK: Final = 1
_ATTR_MEMORY_TYPES: Final = 1 << 2
_HOST_MEMORY, _CUDA_MEMORY = 0, 1  # ucs_memory_type_t


class Settled(enum.Enum):
    """An operation that is over at once."""

    DONE = enum.auto()


DONE: Final = Settled.DONE

MessageHandler = Callable[[bytes, bytes], None]
"""Gets the header and the body of an active message, during `progress`."""

ErrorHandler = Callable[[str], None]
"""Gets UCX's words when an endpoint has failed, during `progress` or `close`. It must not call UCX."""


class Ucx:
    """One loaded libucp. Its methods raise `TransportError` with UCX's own words as status."""

    def __init__(self, path: str) -> None:
        """Load the library at `path` (or by its soname).

        Raises:
            OSError: it cannot be loaded.
            AttributeError: it is no libucp that we can use.
        """
        self._ffi = _make_ffi()
        self._lib: CData = self._ffi.dlopen(path)
        for name in _FUNCTIONS:
            getattr(self._lib, name)  # ucs_status_string is libucs's: found through libucp's own dependencies
        self._put, self._check_status = self._lib.ucp_put_nbx, self._lib.ucp_request_check_status
        self._progress = self._lib.ucp_worker_progress
        self._plain = self._ffi.new("ucp_request_param_t *")
        self._am = self._param(_FIELD_FLAGS, flags=_AM_EAGER_COPIED_HEADER)
        self._force = self._param(_FIELD_FLAGS, flags=_CLOSE_FORCE)
        self.path = path

    @property
    def version(self) -> str:
        numbers = [self._ffi.new("unsigned *") for _ in range(3)]
        self._lib.ucp_get_version(*numbers)
        return ".".join(str(number[0]) for number in numbers)

    def status_string(self, status: int) -> str:
        return str(self._ffi.string(self._lib.ucs_status_string(status)).decode())

    def check(self, status: int, what: str, error: type[TransportError] = TransportError) -> None:
        """The one map of errors.

        Raises:
            TransportError: (or `error`) `status` is one.
        """
        if status < 0:
            raise error(BACKEND, self.status_string(status), f"{what} failed")

    def context(self, settings: dict[str, str]) -> Handle:
        """A context for RMA, active messages and wake-ups; `settings` without `UCX_` go over those of the process.

        Raises:
            ConfigError: UCX does not take a setting.
            TransportError: no context can be made with them.
        """
        config = self._out("void **", lambda out: self._lib.ucp_config_read(self._ffi.NULL, self._ffi.NULL, out))
        try:
            for name, value in settings.items():
                if self._lib.ucp_config_modify(config, name.encode(), value.encode()) < 0:
                    raise ConfigError(f"UCX_{name}", f"UCX {self.version} does not take {value!r}")
            params = self._ffi.new(
                "ucp_params_t *", {"field_mask": 1 | 1 << 5, "features": _FEATURES, "mt_workers_shared": 1}
            )
            major, minor, _ = (int(part) for part in self.version.split("."))
            return Handle(
                self._out("void **", lambda out: self._lib.ucp_init_version(major, minor, params, config, out))
            )
        finally:
            self._lib.ucp_config_release(config)

    def cleanup(self, context: Handle) -> None:
        self._lib.ucp_cleanup(context)

    def knows_cuda(self, context: Handle) -> bool:
        """Whether a context can move CUDA memory: its cuda modules loaded, they found a GPU, and UCX_TLS allows them.

        Raises:
            TransportError: UCX does not say.
        """
        found = self._ffi.new("ucp_context_attr_t *", {"field_mask": _ATTR_MEMORY_TYPES})
        self.check(self._lib.ucp_context_query(context, found), "asking for a context's memory types")
        return bool(found.memory_types & 1 << _CUDA_MEMORY)

    def map_memory(self, context: Handle, address: int, length_bytes: int, *, cuda: bool) -> tuple[Handle, bytes]:
        """Register memory of the host or of a GPU, remotely writable but not readable. Its handle, and the rkey for peers.

        For CUDA memory the thread needs a current CUDA context.

        Raises:
            RegistrationError: UCX refused it.
        """
        params = self._ffi.new(
            "ucp_mem_map_params_t *",
            {
                "field_mask": 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4,  # address, length, prot, memory type
                "address": self._ffi.cast("void *", address),
                "length": length_bytes,
                "prot": _LOCAL_READ | _LOCAL_WRITE | _REMOTE_WRITE,
                "memory_type": _CUDA_MEMORY if cuda else _HOST_MEMORY,
            },
        )
        memory = self._out("void **", lambda out: self._lib.ucp_mem_map(context, params, out), RegistrationError)
        buffer, size = self._ffi.new("void **"), self._ffi.new("size_t *")
        try:
            self.check(self._lib.ucp_rkey_pack(context, memory, buffer, size), "packing an rkey", RegistrationError)
        except RegistrationError:
            self._lib.ucp_mem_unmap(context, memory)
            raise
        rkey = bytes(self._ffi.buffer(buffer[0], size[0]))
        self._lib.ucp_rkey_buffer_release(buffer[0])
        return Handle(memory), rkey

    def unmap_memory(self, context: Handle, memory: Handle) -> None:
        self.check(self._lib.ucp_mem_unmap(context, memory), "unmapping memory")

    def worker(self, context: Handle) -> Handle:
        params = self._ffi.new(
            "ucp_worker_params_t *",
            {
                "field_mask": 1 << 0 | 1 << 2 | 1 << 5,  # thread mode, events, flags
                "thread_mode": _THREADS_SERIALIZED,
                "events": _EVENTS,
                "flags": _IGNORE_REQUEST_LEAK,
            },
        )
        return Handle(self._out("void **", lambda out: self._lib.ucp_worker_create(context, params, out)))

    def destroy_worker(self, worker: Handle) -> None:
        self._lib.ucp_worker_destroy(worker)

    def address(self, worker: Handle) -> bytes:
        out, length = self._ffi.new("void **"), self._ffi.new("size_t *")
        self.check(self._lib.ucp_worker_get_address(worker, out, length), "reading a worker's address")
        copy = bytes(self._ffi.buffer(out[0], length[0]))
        self._lib.ucp_worker_release_address(worker, out[0])
        return copy

    def event_fd(self, worker: Handle) -> int:
        """Readable when `progress` has work, once `arm` said so. Owned by the worker."""
        return int(self._out("int *", lambda out: self._lib.ucp_worker_get_efd(worker, out)))

    def progress(self, worker: Handle) -> bool:
        """Do some of what is due; whether there was any."""
        return bool(self._progress(worker))

    def arm(self, worker: Handle) -> bool:
        """Whether the event fd tells of all that comes; False: progress first, something is due."""
        status = self._lib.ucp_worker_arm(worker)
        if status == _ERR_BUSY:
            return False
        self.check(status, "arming a worker")
        return True

    def on_message(self, worker: Handle, message_id: int, handler: MessageHandler) -> object:
        """Receive active messages `message_id`. Keep what it returns as long as the worker."""
        ffi = self._ffi

        def receive(_arg: CData, header: CData, header_bytes: int, data: CData, length: int, _param: CData) -> int:
            handler(bytes(ffi.buffer(header, header_bytes)), bytes(ffi.buffer(data, length)) if length else b"")
            return 0

        callback = ffi.callback("ucp_am_recv_callback_t", receive)
        params = ffi.new(
            "ucp_am_handler_param_t *",
            {"field_mask": 0b111, "id": message_id, "flags": _AM_WHOLE_MESSAGE, "cb": callback},
        )
        self.check(self._lib.ucp_worker_set_am_recv_handler(worker, params), "setting a message handler")
        return callback

    def connect(self, worker: Handle, address: bytes, handler: ErrorHandler) -> tuple[Handle, object]:
        """An endpoint to the worker at `address`, with peer error handling. Keep the second as long as the worker."""

        def failed(_arg: CData, _endpoint: CData, status: int) -> None:
            handler(self.status_string(status))

        callback = self._ffi.callback("ucp_err_handler_cb_t", failed)
        there = self._ffi.from_buffer(address)
        params = self._ffi.new(
            "ucp_ep_params_t *",
            {
                "field_mask": 0b111,  # remote address, error mode, error handler
                "address": there,
                "err_mode": _ERROR_MODE_PEER,
                "err_handler": {"cb": callback},
            },
        )
        endpoint = self._out("void **", lambda out: self._lib.ucp_ep_create(worker, params, out))
        return Handle(endpoint), callback

    def transports(self, endpoint: Handle) -> list[tuple[str, str]]:
        """(transport, device) of each lane that UCX chose for an endpoint, as soon as it is made."""
        entries = self._ffi.new("ucp_transport_entry_t[]", _MOST_LANES)
        room = {"entries": entries, "num_entries": _MOST_LANES, "entry_size": self._ffi.sizeof("ucp_transport_entry_t")}
        found = self._ffi.new("ucp_ep_attr_t *", {"field_mask": 1 << 3, "transports": room})
        self.check(self._lib.ucp_ep_query(endpoint, found), "asking for an endpoint's transports")
        lanes = [entries[number] for number in range(found.transports.num_entries)]
        text = self._ffi.string
        return [(text(lane.transport_name).decode(), text(lane.device_name).decode()) for lane in lanes]

    def close(self, endpoint: Handle) -> Request | Settled:
        """Force an endpoint to close: what was posted is purged, not flushed. Done: its operations are over too."""
        return self._started(self._lib.ucp_ep_close_nbx(endpoint, self._force), "closing an endpoint")

    def flush(self, endpoint: Handle) -> Request | Settled:
        return self._started(self._lib.ucp_ep_flush_nbx(endpoint, self._plain), "flush")

    def unpack_rkey(self, endpoint: Handle, rkey: bytes) -> Handle:
        """Raises: RegistrationError: UCX cannot use it."""
        packed = self._ffi.from_buffer(rkey)
        unpack = self._lib.ucp_ep_rkey_unpack
        return Handle(self._out("void **", lambda out: unpack(endpoint, packed, out), RegistrationError))

    def destroy_rkey(self, rkey: Handle) -> None:
        self._lib.ucp_rkey_destroy(rkey)

    def put_param(self, memory: Handle) -> Handle:
        """What `put` needs to know of local memory. Keep it as long as the puts."""
        return Handle(self._param(_FIELD_MEMH, memh=memory))

    def put(
        self, endpoint: Handle, local: int, length_bytes: int, remote: int, rkey: Handle, param: Handle
    ) -> Request | Settled:
        """Post one put. Over cma the whole copy happens here."""
        return self._started(self._put(endpoint, local, length_bytes, remote, rkey, param), "put")

    def send(self, endpoint: Handle, message_id: int, header: bytes, body: CData) -> Request | Settled:
        """Post an active message. `body` must stay as it is until the request is over."""
        request = self._lib.ucp_am_send_nbx(endpoint, message_id, header, len(header), body, len(body), self._am)
        return self._started(request, "active message")

    def pinned(self, body: bytes) -> CData:
        """`body` at an address that stays, for `send`."""
        return self._ffi.from_buffer(body)

    def outcome(self, request: Request) -> int | None:
        """None while it is in progress; otherwise its status, and the request is freed."""
        status = int(self._check_status(request))
        if status == _INPROGRESS:
            return None
        self._lib.ucp_request_free(request)
        return status

    def _started(self, pointer: int, what: str) -> Request | Settled:
        if not pointer:
            return DONE
        if pointer >= _FIRST_ERROR:
            self.check(pointer - 2**64, what)
        return Request(pointer)

    def _param(self, mask: int, **fields: CData) -> CData:
        return self._ffi.new("ucp_request_param_t *", {"op_attr_mask": mask, **fields})

    def _out(self, kind: str, call: Callable[[CData], int], error: type[TransportError] = TransportError) -> CData:
        out = self._ffi.new(kind)
        self.check(call(out), "a call of UCX", error)
        return out[0]


def _make_ffi() -> CData:
    try:
        ffi = importlib.import_module("cffi").FFI()
    except ImportError as exc:
        raise ConfigError("transport", "ucx needs cffi: pip install 'rdma-kv[ucx]'") from exc
    ffi.cdef(_CDEF)
    return ffi
