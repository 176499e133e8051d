"""The lives of a pool's worker processes. Pure: events and the time in, commands out.

A seat is where one worker lives after the other: waiting (for its turn to start) → starting → ready → dying → waiting. At most
`STARTS_AT_ONCE` start at a time, and at most `respawns_per_minute` replacements start within any minute. Workers that die
again and again before they were ever ready are a fault that stops the pool, because the next one would die too.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from envpool.commands import Fault, Kill, Spawn
from envpool.deadlines import Deadlines

STARTS_AT_ONCE = 8
START_FAILURES = 3
"""So many workers in a row that died before they were ready are no accident."""
KILL_SECONDS = 30.0
"""How long a killed worker may take to be gone: the kernel ends it at once unless it is stuck in a device."""
MINUTE = 60.0
_THROTTLE = -1


class SeatPhase(enum.StrEnum):
    """See the module."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DYING = "dying"


@dataclass
class _Seat:
    phase: SeatPhase = SeatPhase.WAITING
    generation: int = 0


class Seats:
    """All seats of a pool. `fault` is set once it cannot work; `last_end` says how the last worker ended."""

    def __init__(self, count: int, start_seconds: float, respawns_per_minute: int) -> None:
        self.seats = [_Seat() for _ in range(count)]
        self.fault: Fault | None = None
        self.last_end = ""
        self._start_seconds = start_seconds
        self._limit = respawns_per_minute
        self._waiting = deque(range(count))
        self._starting = 0
        self._start_failures = 0
        self._respawned: deque[float] = deque()
        self._deadlines = Deadlines()

    def is_current(self, seat: int, generation: int) -> bool:
        """Whether the seat's worker of now is this one, alive as far as is known."""
        return self.seats[seat].generation == generation and self.seats[seat].phase in (SeatPhase.STARTING, SeatPhase.READY)

    def phase(self, seat: int) -> SeatPhase:
        """The seat's phase."""
        return self.seats[seat].phase

    def generation(self, seat: int) -> int:
        """How many workers the seat has had."""
        return self.seats[seat].generation

    def refuse(self, fault: Fault) -> None:
        """A worker said why none of its kind can work. The first cause counts."""
        self.fault = self.fault or fault

    def phases(self) -> dict[str, int]:
        """How many seats are in each phase."""
        return {str(phase): sum(seat.phase == phase for seat in self.seats) for phase in SeatPhase}

    @property
    def exhausted(self) -> bool:
        """No worker lives or is on its way, and none may be started yet."""
        return len(self._waiting) == len(self.seats)

    def pump(self, now: float) -> list[Spawn]:
        """Start what may be started."""
        commands: list[Spawn] = []
        if not self._waiting:
            return commands
        while self._respawned and self._respawned[0] <= now - MINUTE:
            self._respawned.popleft()
        self._deadlines.clear(_THROTTLE)
        while self._waiting and self._starting < STARTS_AT_ONCE and self.fault is None:
            number = self._waiting[0]
            seat = self.seats[number]
            if seat.generation and len(self._respawned) >= self._limit:
                self._deadlines.set(_THROTTLE, self._respawned[0] + MINUTE)
                break
            self._waiting.popleft()
            if seat.generation:
                self._respawned.append(now)
            seat.generation += 1
            seat.phase = SeatPhase.STARTING
            self._starting += 1
            self._deadlines.set(number, now + self._start_seconds)
            commands.append(Spawn(number, seat.generation))
        return commands

    def ready(self, number: int) -> None:
        """The starting worker takes calls."""
        seat = self.seats[number]
        assert seat.phase == SeatPhase.STARTING, seat.phase
        self._starting -= 1
        self._start_failures = 0
        seat.phase = SeatPhase.READY
        self._deadlines.clear(number)

    def end(self, now: float, number: int, detail: str) -> Kill:
        """The worker is dead or is to die, because it `detail`: make sure of it."""
        seat = self.seats[number]
        assert seat.phase in (SeatPhase.STARTING, SeatPhase.READY), seat.phase
        self.last_end = detail
        if seat.phase == SeatPhase.STARTING:
            self._starting -= 1
            self._start_failures += 1
            if self._start_failures >= START_FAILURES:
                self.refuse(Fault(False, f"{self._start_failures} env workers in a row failed to start; the last one {detail}."))
        seat.phase = SeatPhase.DYING
        self._deadlines.set(number, now + KILL_SECONDS)
        return Kill(number, seat.generation)

    def gone(self, number: int, generation: int) -> bool:
        """The worker has left nothing behind. False if that is no news."""
        seat = self.seats[number]
        if seat.phase != SeatPhase.DYING or seat.generation != generation:
            return False
        seat.phase = SeatPhase.WAITING
        self._deadlines.clear(number)
        self._waiting.append(number)
        return True

    def next_deadline(self) -> float | None:
        """When `due` must be asked again."""
        return self._deadlines.next()

    def due(self, now: float) -> list[int]:
        """Workers that must be ended because they did not start in time. Sets `fault` if one cannot be killed."""
        late = []
        for number in self._deadlines.due(now):
            if number == _THROTTLE:
                continue  # `pump` comes next and finds the window open
            if self.seats[number].phase == SeatPhase.STARTING:
                late.append(number)
            else:
                self.refuse(Fault(False, f"an env worker could not be killed within {KILL_SECONDS:g} s: look at its machine."))
        return late
