"""Memory of GPUs in the NIXL transport: what of it NIXL can have, and the CUDA context of NIXL's calls. On the owner thread.

Theory of operation. UCX's cuda modules need a current CUDA context on the thread that calls them (see `rdma_kv.cuda` for
what goes wrong without). All of NIXL's calls come from the owner thread, on which no code of the application runs. So the
primary context of the first device whose memory is registered is pushed there once, and stays until `close`. Until then
nothing of CUDA is loaded.

A copy that a GPU has begun is not taken back, neither by NIXL nor by the end of its agent: `synchronize` waits until the
GPUs have done all that was asked of them. That includes the work of the application on these GPUs, so it is for fences, and
bounded: the owner thread serves all links.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Final

from rdma_kv.cuda import BACKEND, Cuda
from rdma_kv.errors import DEVICE_MEMORY, RegistrationError
from rdma_kv.types import Region

SYNCHRONIZE_S: Final = 2.0
"""More than any copy takes that was posted (4 GiB take 0.1 s), and less than peers wait for a heartbeat."""


class Devices:
    """The GPUs of one transport.

    Args:
        load: makes the `Cuda`, when memory of a GPU is registered for the first time.
    """

    def __init__(self, load: Callable[[], Cuda] = Cuda) -> None:
        self._load = load
        self._cuda: Cuda | None = None
        self._ordinals: set[int] = set()
        self._pushed = contextlib.ExitStack()

    @property
    def present(self) -> bool:
        """Whether memory of a GPU is registered, or was. Read from any thread."""
        return self._cuda is not None

    def admit(self, region: Region, *, exported: bool, probe: Callable[[Region], None]) -> None:
        """See that `region`, which is on a device, can be used, and have a context for what follows.

        Args:
            exported: whether it is of no use unless other processes can map it.
            probe: asks NIXL, the first time; raises RegistrationError.

        Raises:
            RegistrationError: there is no libcuda, no such device, the memory is not what `region` says, or `probe`
                refused it. Then nothing has changed.
        """
        cuda = self._cuda or self._load()
        ordinal = region.device - 1
        try:
            cuda.retain(ordinal)
            with cuda.current(ordinal):
                cuda.check_memory(region.address, region.length_bytes, ordinal, exported=exported)
                if self._cuda is None:
                    probe(region)
        except BaseException:
            if self._cuda is None:
                cuda.close()
            raise
        self._ordinals.add(ordinal)
        if self._cuda is None:
            self._pushed.enter_context(cuda.current(ordinal))
            self._cuda = cuda

    def at(self, device: int) -> contextlib.AbstractContextManager[None]:
        """Inside, the context of an admitted region's device is current; of the host's, whichever was."""
        if not device or self._cuda is None:
            return contextlib.nullcontext()
        return self._cuda.current(device - 1)

    def synchronize(self, timeout_s: float = SYNCHRONIZE_S) -> None:
        """Wait until our GPUs have done all that this process asked of them so far. Blocks the thread, not the GIL.

        Raises:
            RegistrationError: CUDA cannot tell, or not in time: a kernel of the application may never end.
        """
        cuda, errors = self._cuda, []
        if cuda is None:
            return

        def wait() -> None:
            try:
                for ordinal in tuple(self._ordinals):
                    cuda.synchronize(ordinal)
            except RegistrationError as exc:
                errors.append(exc)

        thread = threading.Thread(target=wait, name="rdma-kv-nixl-fence", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            text = f"the GPU has not done within {timeout_s:g} s what was asked of it"
            raise RegistrationError(BACKEND, DEVICE_MEMORY, text)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Give up the contexts. The last call."""
        self._pushed.close()
        if self._cuda is not None:
            self._cuda.close()
