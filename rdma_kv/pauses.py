"""How long to sleep before a look at something that does not tell by itself when it is done, and sleeps that short.

What is late is looked at again after a part of the time by which it is late. So its end is noticed late by that part at
most, and what does not end costs fewer and fewer looks.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

PARTS: Final = 8
"""Into which the time is cut by which something is late: its end is noticed an eighth later at most."""

_PR_SET_TIMERSLACK: Final = 29
_TIMER_SLACK_NS: Final = 1000
"""By which the kernel may prolong a thread's sleep. The usual 50,000 would double the shortest."""


def pause_s(late_s: float, shortest_s: float, longest_s: float, parts: int = PARTS) -> float:
    """How long to sleep before the next look.

    Args:
        late_s: since something was due; negative until then.
        shortest_s: of all pauses.
        longest_s: of those when it is late.
        parts: into which the time is cut by which it is late, to sleep for one of them; 1 doubles that time with each look.
    """
    return max(-late_s if late_s < 0 else min(late_s / parts, longest_s), shortest_s)


def sharpen_sleeps() -> None:
    """Of the calling thread: they end when they should. Elsewhere than on Linux they are as long as they are."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK_NS), 0, 0, 0)
