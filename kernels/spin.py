"""Whether to look at once again for what is about to end, or to sleep: learned from what came of it. No clock.

To fall asleep and to be woken costs a thread 50 to 200 us on a machine whose processors sleep, and a small launch is over in
less. But to look for something that does not come costs the same processor. So one looks without a pause only

* for what is due soon, and not much longer than until it should have come;
* for at most a budget, which doubles when it paid off and halves when it did not, as where the GPU has other things to do.
  One in `AGAIN` of what the budget would not reach is tried all the same.
"""

from __future__ import annotations

from typing import Final

MOST_S: Final = 150e-6
"""Budget at most."""

LEAST_S: Final = 10e-6
"""A budget below is none: one turn of an event loop takes half of it."""

GRACE_S: Final = 60e-6
"""What is so much later than it was due is waited for asleep."""

AGAIN: Final = 64


class Spin:
    """See the module. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._budget_s = self._tried_s = MOST_S
        self._skipped = 0
        self._until: float | None = None  # while it looks
        self._over = False  # it has looked, or has chosen not to

    def goes_on(self, now: float, due: float) -> bool:
        """Whether to look again at once. Asked after each look.

        Args:
            due: when the next thing that is under way should end.
        """
        if self._over:
            return False
        if self._until is None:
            wanted_s = max(due - now, 0.0)
            budget_s = self._budget_for(wanted_s)
            if budget_s < max(wanted_s, LEAST_S):
                self._over = True
                return False
            self._tried_s = budget_s
            self._until = now + min(budget_s, wanted_s + GRACE_S)
        if now < self._until:
            return True
        self._learn(paid=False)
        self._until, self._over = None, True
        return False

    def found(self) -> None:
        """Something has ended: what comes next is another matter."""
        if self._until is not None:
            self._learn(paid=True)
        self.begun()

    def begun(self) -> None:
        """Something has begun that may be due soon."""
        self._until, self._over = None, False

    def _budget_for(self, wanted_s: float) -> float:
        if max(wanted_s, LEAST_S) <= self._budget_s or wanted_s > MOST_S:
            return self._budget_s
        self._skipped = (self._skipped + 1) % AGAIN
        return 0.0 if self._skipped else MOST_S

    def _learn(self, *, paid: bool) -> None:
        if paid:
            self._budget_s = min(max(2 * self._budget_s, self._tried_s), MOST_S)
        elif self._budget_s >= LEAST_S:
            self._budget_s /= 2
