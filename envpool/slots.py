"""Slot accounting of a pool: W seats (one worker process each) of K slots (one environment instance each). Pure.

Every slot is in exactly one state, and free + starting + leased + dying = W × K at all times:

    starting   its worker is being started, or waits for its turn to be
    free       takes an instance
    leased     holds an instance
    dying      its instance is being closed, or its worker was killed and is not gone yet
"""

from __future__ import annotations

import enum


class SlotState(enum.StrEnum):
    """See the module."""

    FREE = "free"
    STARTING = "starting"
    LEASED = "leased"
    DYING = "dying"


class Slots:
    """Slots are numbered seat · K + index. Seats change as a whole (`open`, `kill`, `restart`), slots one by one."""

    def __init__(self, seats: int, per_seat: int) -> None:
        self.per_seat = per_seat
        self.counts = dict.fromkeys(SlotState, 0)
        self.counts[SlotState.STARTING] = seats * per_seat
        self._state = [SlotState.STARTING] * (seats * per_seat)
        self._free: list[list[int]] = [[] for _ in range(seats)]
        self._rotation = 0

    @property
    def total(self) -> int:
        """All slots, in whatever state."""
        return len(self._state)

    def state(self, slot: int) -> SlotState:
        return self._state[slot]

    def seat_of(self, slot: int) -> int:
        return slot // self.per_seat

    def slots_of(self, seat: int) -> range:
        return range(seat * self.per_seat, (seat + 1) * self.per_seat)

    def lease(self) -> int | None:
        """A free slot on the seat with the most of them, ties by rotation; None if there is none."""
        seats = len(self._free)
        best = max(range(self._rotation, self._rotation + seats), key=lambda i: len(self._free[i % seats])) % seats
        if not self._free[best]:
            return None
        self._rotation = (best + 1) % seats
        slot = self._free[best].pop()
        self._move(slot, SlotState.LEASED)
        return slot

    def closing(self, slot: int) -> None:
        """The instance in a leased slot is being closed."""
        assert self._state[slot] == SlotState.LEASED, self._state[slot]
        self._move(slot, SlotState.DYING)

    def free(self, slot: int) -> None:
        """The instance in a closing slot is gone, its worker is well."""
        assert self._state[slot] == SlotState.DYING, self._state[slot]
        self._move(slot, SlotState.FREE)
        self._free[self.seat_of(slot)].append(slot)

    def open(self, seat: int) -> None:
        """The seat's worker takes calls."""
        for slot in self.slots_of(seat):
            assert self._state[slot] == SlotState.STARTING, self._state[slot]
            self._move(slot, SlotState.FREE)
        self._free[seat] = list(reversed(self.slots_of(seat)))

    def kill(self, seat: int) -> None:
        """The seat's worker was killed or died: none of its slots can be used."""
        self._free[seat] = []
        for slot in self.slots_of(seat):
            self._move(slot, SlotState.DYING)

    def restart(self, seat: int) -> None:
        """The seat's dead worker is gone; another is to take its place."""
        for slot in self.slots_of(seat):
            assert self._state[slot] == SlotState.DYING, self._state[slot]
            self._move(slot, SlotState.STARTING)

    def _move(self, slot: int, state: SlotState) -> None:
        self.counts[self._state[slot]] -= 1
        self.counts[state] += 1
        self._state[slot] = state
