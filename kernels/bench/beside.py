"""A decode-like step while gathers run beside it in the same process: by how much they slow it.

The step is what decoding with a small batch mostly is: products of few rows with large weights, so it reads memory as fast as
it can, on all multiprocessors. Gathers of scattered rows follow one another on a stream of their own for as long as steps
are timed; nothing paces them but their number of programs.
"""

from __future__ import annotations

import torch

from rdma_kv.errors import RdmaKvError
from rdma_kv.kernels import tiles
from rdma_kv.kernels.bench.gpu import CURVE_CASE, build

ROWS = 32  # of a batch
WIDTH = 8192
WEIGHTS = 16  # of WIDTH x WIDTH, 128 MiB each: some 0.6 ms on an H200
_STEPS = 10  # of a sample
_GATHERED_BYTES = 256 << 20  # by one launch
_MORE = 2.0  # times the steps' own time that the gathers behind them are to take


class Beside:
    """One GPU, with its weights, and pages that are gathered."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights = [torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=device) for _ in range(WEIGHTS)]
        self._inputs = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device=device)
        self._outputs = torch.empty_like(self._inputs)
        self._pool = torch.zeros(4 * _GATHERED_BYTES, dtype=torch.uint8, device=device)
        self._packed = torch.zeros(_GATHERED_BYTES, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)
        uploaded = tiles.upload([build(CURVE_CASE, self._pool, self._packed)], device=device, stream=self._stream)
        assert uploaded is not None
        self._gather = uploaded

    def step_s(self, programs: int = 0, launch_s: float = 0.0, alone_s: float = 0.0) -> float:
        """Device time of a step.

        Args:
            programs: of the gathers beside it; 0 for none.
            launch_s: what one gather in so many programs takes.
            alone_s: what a step takes alone.

        Raises:
            RdmaKvError: the gathers had ended before the steps did.
        """
        start, end, gathered = (torch.cuda.Event(enable_timing=each) for each in (True, True, False))
        torch.cuda.synchronize(self._device)
        if programs:
            under_way = torch.cuda.Event()
            count = 2 + round(_MORE * _STEPS * alone_s / launch_s)
            for number in range(count):
                self._gather.start(scatter=False, programs=programs)
                if not number:
                    under_way.record(self._stream)
            gathered.record(self._stream)
            torch.cuda.current_stream(self._device).wait_event(under_way)
        start.record()
        for _ in range(_STEPS):
            for weight in self._weights:
                torch.mm(self._inputs, weight, out=self._outputs)
        end.record()
        end.synchronize()
        if programs and gathered.query():
            raise RdmaKvError("the gathers ended before the steps beside them")
        torch.cuda.synchronize(self._device)
        return float(start.elapsed_time(end)) / 1e3 / _STEPS

    def launch_s(self, programs: int) -> float:
        """Device time of one gather in so many programs, alone."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._gather.start(scatter=False, programs=programs)
        start.record(self._stream)
        self._gather.start(scatter=False, programs=programs)
        end.record(self._stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
