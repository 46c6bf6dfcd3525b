"""Two processes with memory of GPUs and a link between them, for the tests of each transport."""

from __future__ import annotations

import importlib.util

from cuda_child import Child

MIB = 1 << 20
LENGTH_BYTES = 256 * MIB + 64


def gpus() -> int:
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class Pair:
    """Two connected processes; WRITEs go from `left` to `right`."""

    def __init__(
        self, backend, left_ordinal=0, right_ordinal=0, length_bytes=LENGTH_BYTES, guard=True, **environ: str
    ) -> None:
        self.left = Child("left@1", "right@1", left_ordinal, length_bytes, backend=backend, **environ)
        self.right = Child("right@1", "left@1", right_ordinal, length_bytes, backend=backend, **environ)
        self.device = right_ordinal + 1
        try:
            for child in (self.left, self.right):
                if not guard:
                    child.call("without_guard")
                child.post("start")
            (_, metadata), (self.addresses, there) = self.left.answer(), self.right.answer()
            self.right.call("connect", metadata=metadata)
            self.left.call("connect", metadata=there)
        except BaseException:
            self.end()
            raise

    def write(self, local, remote, length_bytes, command="write", **more):
        return self.left.call(
            command,
            local=local,
            remote=remote,
            addresses=self.addresses,
            length_bytes=length_bytes,
            remote_device=self.device,
            **more,
        )

    def end(self):
        self.left.end()
        self.right.end()


def moves(pair, length_bytes, *, source="gpu", destination="gpu"):
    """A WRITE between odd offsets; the bytes are looked at by torch in the callback of the notification."""
    seed = length_bytes % 251 + 1
    pair.left.call("fill", kind=source, offset=3, length_bytes=length_bytes, seed=seed)
    pair.right.call("expect", kind=destination, offset=17, length_bytes=length_bytes, seed=seed)
    took_s = pair.write((source, 3), (destination, 17), length_bytes, body=b"arrived")
    assert pair.right.call("notified") == (b"arrived", True)
    return took_s
