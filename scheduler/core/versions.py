"""Weight versions: ids that are never reused, each mapped to the step whose weights it names, as long as somebody may ask for it.

Who may: the tokens of an unfinished group (none is older than the group's `floor`), of a running evaluation, of a batch not yet
committed; a node that runs or is about to load a version; and admission, which looks for the oldest version within the bound.
Everything older than all of these is forgotten with every trained batch, so that table and checkpoints do not grow with the run.
"""

from __future__ import annotations

from segue.trajectory import NO_VERSION


class Versions:
    """The version table. Steps never decrease with the ids: a rollback takes the steps of abandoned versions back with it."""

    def __init__(self) -> None:
        self.next_id = 0
        self.newest = NO_VERSION
        self._steps: dict[int, int] = {}

    def publish(self, step: int) -> int:
        """Give the weights of `step` an id."""
        assert not self._steps or step >= next(reversed(self._steps.values())), "a step goes back only by a rollback"
        version = self.next_id
        self.next_id += 1
        self.newest = version
        self._steps[version] = step
        return version

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, version: int) -> bool:
        return version in self._steps

    def step(self, version: int) -> int:
        """The step of a version that was published; 0 before the first publish."""
        return self._steps[version] if version != NO_VERSION else 0

    def at_least(self, step: int) -> int:
        """The smallest id from which on every version has `step` or more; an id yet to come if none has."""
        found = self.next_id
        for version, known in reversed(self._steps.items()):
            if known < step:
                break
            found = version
        return found

    def forget(self, before: int, step: int) -> None:
        """Forget the versions with smaller ids than `before` and steps below `step`; never the last one."""
        for version in list(self._steps):
            if version >= before or self._steps[version] >= step or len(self._steps) == 1:
                return
            del self._steps[version]

    def rollback(self, step: int) -> None:
        """The learner went back to `step`: abandoned versions take the smaller of their step and `step`; none is the newest."""
        for version, old in self._steps.items():
            self._steps[version] = min(old, step)
        self.newest = NO_VERSION

    def table(self) -> dict[int, int]:
        """A copy of the table."""
        return dict(self._steps)

    def restore(self, table: dict[int, int], next_id: int, step: int) -> None:
        """Take over another life's table; `next_id` must be above every id that life ever gave out."""
        assert all(version < next_id for version in table)
        self._steps = dict(sorted(table.items()))
        self.next_id = next_id
        self.rollback(step)
