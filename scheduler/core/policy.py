"""When new weights go to the nodes, and how requests in flight cross: `update.policy`.

`every`: at once, as `update.inflight` says. `budget`: as long as re-prefill for weight updates takes more than its budget of
the rollout time in the window, versions are held back; the next one takes the place of one that is held (they are *coalesced*).
One is never held back

- when the nodes are η steps behind it (the step published to nodes is never more than η behind the learner's),
- when the learner has no batch ahead and no group may begin under the weights that the nodes have (holding it would stall both),
- when an evaluation, or an episode that was sampled under newer weights, waits for it,
- when it is of no later step than that of the nodes: the learner went back to a checkpoint.

An update that goes out over the budget shows that coalescing is not enough: it takes the next cheaper way across, of those that
`update.budget_inflight` allows, and so do the ones after it until the share has fallen to `EASE` of the budget. Pure.
"""

from __future__ import annotations

from segue.config.scheduler import UpdateConfig

EASE = 0.5
"""Of the budget: below it the dearer way across is tried again. Between the two nothing changes, so that it does not flutter."""
DROPS_KV = ("recompute", "turn")
"""The ways that cost re-prefill; from the others nothing is gained by going over to another."""


class UpdatePolicy:
    """See the module. `level` is how far down the list of ways it has gone."""

    def __init__(self, update: UpdateConfig, max_age: int) -> None:
        self._budget = update.reprefill_budget if update.policy == "budget" else None
        self._max_age = max_age
        cheaper = [way for way in update.budget_inflight if way != update.inflight]
        self._ways = [update.inflight, *(cheaper if update.inflight in DROPS_KV else [])]
        self.level = 0

    @property
    def holds(self) -> bool:
        """Whether it ever holds anything back."""
        return self._budget is not None

    @property
    def inflight(self) -> str:
        """The way across of an update that begins now."""
        return self._ways[self.level]

    def affordable(self, share: float) -> bool:
        """Whether the share is within the budget."""
        return self._budget is None or share <= self._budget

    def release(self, behind: int, pressing: bool, share: float) -> bool:
        """Does the newest version go out now? The nodes are `behind` by so many steps; something is `pressing`."""
        if self._budget is None:
            return True
        if share <= self._budget:
            if share <= EASE * self._budget:
                self.level = max(0, self.level - 1)
            return True
        if 0 < behind < self._max_age and not pressing:
            return False
        self.level = min(self.level + 1, len(self._ways) - 1)
        return True
