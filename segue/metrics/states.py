"""Clocks that split a process's wall time into named states.

Time is handed in as a callable of seconds (the event loop's clock, or a fake one) and kept in whole nanoseconds, so that the
parts sum to the elapsed time exactly, whatever the number of changes. A scrape reads from another thread: each clock holds
a lock for the few instructions of a change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from segue.metrics.vocabulary import OTHER

_NANO = 1_000_000_000


class Clock(Protocol):
    """What the registry exports: seconds per state so far, and how many activities are in each state now."""

    def restart(self) -> None:
        """Forget what was measured so far; time counts from now."""
        ...

    def seconds(self) -> dict[str, float]: ...

    def current(self) -> dict[str, int]: ...

    def changes(self) -> int:
        """How often something changed its state: what the clock cost, counted."""
        ...


class _Ledger:
    """Nanoseconds per state, where `occupied[state]` things spend time in each at once."""

    def __init__(self, states: Sequence[str], now: Callable[[], float], occupied: dict[str, int]) -> None:
        if len(set(states)) != len(states):
            raise ValueError(f"a state is named twice in {list(states)}")
        self._now = now
        self._spent = dict.fromkeys(states, 0)
        self._occupied = dict.fromkeys(states, 0) | occupied
        self._held = {state: count for state, count in self._occupied.items() if count}  # what time is charged to
        self._last = self._read()
        self.changes = 0
        self.lock = threading.Lock()

    def _read(self) -> int:
        return round(self._now() * _NANO)

    def charge(self) -> None:
        """Book the time since the last call. A clock that went back books nothing."""
        moment = round(self._now() * _NANO)
        passed = moment - self._last
        if passed <= 0:
            return
        self._last = moment
        spent = self._spent
        for state, count in self._held.items():
            spent[state] += count * passed

    def restart(self) -> None:
        with self.lock:
            self._last = self._read()
            self._spent = dict.fromkeys(self._spent, 0)

    def move(self, source: str, target: str) -> None:
        """Raises ValueError for an unknown target; then nothing has changed."""
        occupied = self._occupied
        if target not in occupied:
            raise ValueError(f"no such state: {target!r}; there are {', '.join(occupied)}")
        self.charge()
        held = self._held
        left = occupied[source] = occupied[source] - 1
        if left:
            held[source] = left
        else:
            del held[source]
        held[target] = occupied[target] = occupied[target] + 1
        self.changes += 1

    def nanoseconds(self) -> dict[str, int]:
        with self.lock:
            self.charge()
            return dict(self._spent)

    def seconds(self) -> dict[str, float]:
        return {state: spent / _NANO for state, spent in self.nanoseconds().items()}

    def current(self) -> dict[str, int]:
        with self.lock:
            return dict(self._occupied)


class StateClock:
    """One activity, in one state at a time; it starts in `start`.

    Example: `with clock.in_state("compute"): …` charges the block to `compute` and goes back to the state before.
    """

    def __init__(self, states: Sequence[str], now: Callable[[], float], start: str = OTHER) -> None:
        self._ledger = _Ledger(states if start in states else (*states, start), now, {start: 1})
        self._state = start

    @property
    def state(self) -> str:
        return self._state

    def enter(self, state: str) -> None:
        """Be in `state` from now on; entering the state one is in is no change."""
        if state == self._state:
            return
        ledger = self._ledger
        with ledger.lock:
            ledger.move(self._state, state)
            self._state = state

    def in_state(self, state: str) -> AbstractContextManager[None]:
        """Be in `state` inside the block, and in the state before it afterwards."""
        return _InState(self, state)

    def restart(self) -> None:
        self._ledger.restart()

    def seconds(self) -> dict[str, float]:
        """Seconds per state up to now; they sum to the time since construction, or since `restart`."""
        return self._ledger.seconds()

    def nanoseconds(self) -> dict[str, int]:
        """The same in whole nanoseconds, where the sum is exact."""
        return self._ledger.nanoseconds()

    def current(self) -> dict[str, int]:
        return self._ledger.current()

    def changes(self) -> int:
        return self._ledger.changes


class _InState:
    """One block of `StateClock.in_state`. Written out: a generator costs several times as much, at every message."""

    __slots__ = ("_before", "_clock", "_state")

    def __init__(self, clock: StateClock, state: str) -> None:
        self._clock = clock
        self._state = state

    def __enter__(self) -> None:
        self._before = self._clock.state
        self._clock.enter(self._state)

    def __exit__(self, *_: object) -> None:
        self._clock.enter(self._before)


class ActivityClock:
    """Many activities at once: the process's state is the first in `precedence` that any activity is in, else `other`.

    `begin` and `end` take a state each and must balance per state.
    """

    def __init__(self, precedence: Sequence[str], now: Callable[[], float]) -> None:
        if OTHER in precedence:
            raise ValueError(f"{OTHER} is what is left when no state of the precedence holds: leave it out")
        self._clock = StateClock((*precedence, OTHER), now)
        self._precedence = tuple(precedence)
        self._active = dict.fromkeys(precedence, 0)

    @property
    def state(self) -> str:
        return self._clock.state

    def begin(self, state: str) -> None:
        """One more activity is in `state`."""
        if state not in self._active:
            raise ValueError(f"no such state: {state!r}; there are {', '.join(self._precedence)}")
        self._active[state] += 1
        if self._active[state] == 1:
            self._settle()

    def end(self, state: str) -> None:
        """One activity less is in `state`."""
        if self._active.get(state, 0) < 1:
            raise ValueError(f"no activity is in {state!r}")
        self._active[state] -= 1
        if self._active[state] == 0:
            self._settle()

    def doing(self, state: str) -> AbstractContextManager[None]:
        """Be one activity in `state` inside the block."""
        return _Doing(self, state)

    def active(self, state: str) -> int:
        """How many activities are in `state` now."""
        return self._active[state]

    def _settle(self) -> None:
        for state in self._precedence:
            if self._active[state]:
                break
        else:
            state = OTHER
        self._clock.enter(state)

    def restart(self) -> None:
        self._clock.restart()

    def seconds(self) -> dict[str, float]:
        """Seconds per state up to now; they sum to the time since construction, or since `restart`."""
        return self._clock.seconds()

    def nanoseconds(self) -> dict[str, int]:
        return self._clock.nanoseconds()

    def current(self) -> dict[str, int]:
        return self._clock.current()

    def changes(self) -> int:
        return self._clock.changes()


class _Doing:
    """One block of `ActivityClock.doing`."""

    __slots__ = ("_clock", "_state")

    def __init__(self, clock: ActivityClock, state: str) -> None:
        self._clock = clock
        self._state = state

    def __enter__(self) -> None:
        self._clock.begin(self._state)

    def __exit__(self, *_: object) -> None:
        self._clock.end(self._state)


class SlotClock:
    """`slots` slots, each in one state at a time, all starting in `start`; seconds sum to elapsed time times slots."""

    def __init__(self, states: Sequence[str], slots: int, now: Callable[[], float], start: str) -> None:
        if slots < 1:
            raise ValueError(f"a clock of {slots} slots measures nothing")
        if start not in states:
            raise ValueError(f"the first state {start!r} is none of {', '.join(states)}")
        self._ledger = _Ledger(states, now, {start: slots})
        self._states = [start] * slots

    def move(self, slot: int, state: str) -> None:
        """Slot `slot` is in `state` from now on."""
        ledger = self._ledger
        with ledger.lock:
            ledger.move(self._states[slot], state)
            self._states[slot] = state

    def state(self, slot: int) -> str:
        return self._states[slot]

    def restart(self) -> None:
        self._ledger.restart()

    def seconds(self) -> dict[str, float]:
        """Slot seconds per state up to now."""
        return self._ledger.seconds()

    def nanoseconds(self) -> dict[str, int]:
        return self._ledger.nanoseconds()

    def current(self) -> dict[str, int]:
        return self._ledger.current()

    def changes(self) -> int:
        return self._ledger.changes
