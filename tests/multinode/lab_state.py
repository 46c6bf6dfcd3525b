"""What `python -m tests.multinode` gives the tests that it runs in its process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lane import Lane

LANE: Lane | None = None
"""The nodes, which are up; None where pytest was started without them."""
