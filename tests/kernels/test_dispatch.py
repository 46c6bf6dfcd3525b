"""Who may compile a kernel: a thread that must not be held for seconds is told instead."""

from __future__ import annotations

import threading

import pytest
from implementations import DEVICE, MISSING

if MISSING:
    pytest.skip(f"not installed: {' and '.join(MISSING)}", allow_module_level=True)
import torch
import triton

with pytest.MonkeyPatch.context() as patch:  # as `implementations` does, and why
    if DEVICE == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")
    from rdma_kv.kernels import dispatch
from rdma_kv.kernels.device import NotCompiled


class Compiled(triton.JITFunction):
    """A kernel that says who has compiled and run it."""

    def __init__(self) -> None:
        super().__init__(_nothing)
        self.ran: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        return lambda *_, **__: self.ran.append(threading.get_ident())


def _nothing(table: object) -> None:
    pass


def start(kernel: Compiled) -> None:
    queue = dispatch.queue_of(torch.device(DEVICE), None)
    table = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    dispatch.start(kernel, 1, (table,), (), warps=1, registers=None, queue=queue)


@pytest.fixture
def forbidden():
    dispatch.forbid_compiling(True)
    yield
    dispatch.forbid_compiling(False)


@pytest.mark.skipif(not dispatch._DIRECT, reason="what this Triton has compiled is not known")
def test_a_thread_that_must_not_compile_is_told_and_others_compile(forbidden: None) -> None:
    kernel = Compiled()
    with pytest.raises(NotCompiled):
        start(kernel)
    assert not kernel.ran
    thread = threading.Thread(target=start, args=(kernel,))
    thread.start()
    thread.join()
    assert kernel.ran == [thread.ident]
    dispatch.forbid_compiling(False)
    start(kernel)
    assert kernel.ran[1:] == [threading.get_ident()]
