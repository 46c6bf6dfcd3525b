"""How a task has ended, for those who look at it without waiting."""

from __future__ import annotations

import asyncio
from typing import Any


def succeeded(task: asyncio.Task[Any]) -> bool:
    """Whether `task` has ended, and well."""
    return task.done() and not failed(task)


def failed(task: asyncio.Task[Any]) -> bool:
    """Whether `task` has ended otherwise. Marks its exception as seen."""
    return task.done() and (task.cancelled() or task.exception() is not None)
