"""Weight versions: ids that are never reused, each mapped to the step whose weights it names."""

from __future__ import annotations

from bisect import bisect_left

from segue.trajectory import NO_VERSION


class Versions:
    """The version table. Ids grow with every publish; steps grow with them, except where a rollback took them back."""

    def __init__(self) -> None:
        self.next_id = 0
        self.newest = NO_VERSION
        self._steps: dict[int, int] = {}
        # Ids and steps since the last rollback (to step `_base`): both ascending, so that a step can be looked up.
        self._line_ids: list[int] = []
        self._line_steps: list[int] = []
        self._base = 0

    def publish(self, step: int) -> int:
        """Give the weights of `step` an id."""
        assert not self._line_steps or step >= self._line_steps[-1], "versions only go forward between rollbacks"
        version = self.next_id
        self.next_id += 1
        self.newest = version
        self._steps[version] = step
        self._line_ids.append(version)
        self._line_steps.append(step)
        return version

    def __contains__(self, version: int) -> bool:
        return version in self._steps

    def step(self, version: int) -> int:
        """The step of a version that was published; 0 before the first publish."""
        return self._steps[version] if version != NO_VERSION else 0

    def at_least(self, step: int) -> int:
        """The smallest id from which on every version has `step` or more; an id yet to come if none has."""
        if step <= self._base:
            return 0
        index = bisect_left(self._line_steps, step)
        return self._line_ids[index] if index < len(self._line_ids) else self.next_id

    def rollback(self, step: int) -> None:
        """The learner went back to `step`: abandoned versions take the smaller of their step and `step`; none is the newest."""
        for version, old in self._steps.items():
            self._steps[version] = min(old, step)
        self._line_ids.clear()
        self._line_steps.clear()
        self._base = step
        self.newest = NO_VERSION

    def table(self) -> dict[int, int]:
        """A copy of the table."""
        return dict(self._steps)

    def restore(self, table: dict[int, int], next_id: int, step: int) -> None:
        """Take over another life's table; `next_id` must be above every id that life ever gave out."""
        assert all(version < next_id for version in table)
        self._steps = dict(table)
        self.next_id = next_id
        self.rollback(step)
