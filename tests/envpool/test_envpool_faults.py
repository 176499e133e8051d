"""Faults of other systems that no other test of the env pool meets head on (docs/faults.md)."""

from __future__ import annotations

from envpool.slots import Slots


def test_f52_one_instance_after_another_goes_round_the_workers() -> None:
    """With all workers empty each time, the one with the lowest number is not the one that does all the work."""
    slots = Slots(3, 2)
    for seat in range(3):
        slots.open(seat)
    seats = []
    for _ in range(6):
        slot = slots.lease()
        assert slot is not None
        seats.append(slots.seat_of(slot))
        slots.closing(slot)
        slots.free(slot)
    assert seats == [0, 1, 2, 0, 1, 2]
