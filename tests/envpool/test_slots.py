"""Slot accounting, seats and deadlines: the pure parts under the pool."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envpool.commands import CLASS_OF, GROUP_OF, KillReason, Reason
from envpool.deadlines import Deadlines
from envpool.seats import KILL_SECONDS, START_FAILURES, STARTS_AT_ONCE, SeatPhase, Seats
from envpool.slots import Slots, SlotState
from segue.metrics.vocabulary import ENV_FAILURE_REASONS, ENV_KILL_REASONS


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 15)), max_size=80))
def test_slots_always_sum_and_only_free_ones_are_leased(seats: int, per_seat: int, moves: list[tuple[int, int]]) -> None:
    slots = Slots(seats, per_seat)
    phase = ["starting"] * seats
    leased: set[int] = set()
    closing: set[int] = set()
    for move, which in moves:
        seat = which % seats
        if move == 0 and phase[seat] == "starting":
            slots.open(seat)
            phase[seat] = "ready"
        elif move == 1:
            free = slots.counts[SlotState.FREE]
            slot = slots.lease()
            assert (slot is not None) == (free > 0)
            if slot is not None:
                assert phase[slots.seat_of(slot)] == "ready" and slot not in leased | closing
                leased.add(slot)
        elif move == 2 and leased:
            slot = sorted(leased)[which % len(leased)]
            slots.closing(slot)
            leased.remove(slot)
            closing.add(slot)
        elif move == 3 and closing:
            slot = sorted(closing)[which % len(closing)]
            slots.free(slot)
            closing.remove(slot)
        elif move == 4 and phase[seat] in ("ready", "starting"):
            slots.kill(seat)
            phase[seat] = "dying"
            leased -= set(slots.slots_of(seat))
            closing -= set(slots.slots_of(seat))
        elif move == 5 and phase[seat] == "dying":
            slots.restart(seat)
            phase[seat] = "starting"
        states = [slots.state(slot) for slot in range(slots.total)]
        assert slots.counts == {state: states.count(state) for state in SlotState}
        assert sum(slots.counts.values()) == seats * per_seat
        assert {i for i, state in enumerate(states) if state == SlotState.LEASED} == leased


def test_leases_spread_over_the_seats() -> None:
    """F52: no seat is filled first because it has the lowest number."""
    slots = Slots(3, 2)
    for seat in range(3):
        slots.open(seat)
    seats = []
    for _ in range(6):
        slot = slots.lease()
        assert slot is not None
        seats.append(slots.seat_of(slot))
    assert sorted(seats[:3]) == sorted(seats[3:]) == [0, 1, 2]
    assert slots.lease() is None


@given(st.lists(st.tuples(st.sampled_from(["set", "clear", "due"]), st.integers(0, 5), st.integers(0, 100)), max_size=300))
def test_deadlines_agree_with_a_dict(moves: list[tuple[str, int, int]]) -> None:
    deadlines, reference = Deadlines(), {}
    for what, key, when in moves:
        if what == "set":
            deadlines.set(key, when)
            reference[key] = when
        elif what == "clear":
            deadlines.clear(key)
            reference.pop(key, None)
        else:
            due = list(deadlines.due(when))
            assert sorted(due) == sorted(k for k, t in reference.items() if t <= when)
            assert [reference[k] for k in due] == sorted(reference[k] for k in due)
            for k in due:
                del reference[k]
        assert deadlines.next() == min(reference.values(), default=None)


def test_outdated_deadlines_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for i in range(100_000):
        deadlines.set(i % 10, float(i))
    assert len(deadlines._heap) <= 64 + 2 * 10
    heap = list(deadlines._heap)
    heapq.heapify(heap)
    assert heap == deadlines._heap


def test_only_so_many_workers_start_at_once() -> None:
    seats = Seats(20, 60.0, 60)
    assert len(seats.pump(0.0)) == STARTS_AT_ONCE and seats.pump(0.0) == []
    seats.ready(0)
    assert [spawn.seat for spawn in seats.pump(1.0)] == [STARTS_AT_ONCE]


def test_replacements_are_throttled_and_first_starts_are_not() -> None:
    seats = Seats(3, 60.0, 2)
    now = 0.0
    assert len(seats.pump(now)) == 3
    for seat in range(3):
        seats.ready(seat)
    for number in range(2):
        seats.end(now, 0, "died")
        assert seats.gone(0, number + 1)
        assert [(s.seat, s.generation) for s in seats.pump(now)] == [(0, number + 2)]
        seats.ready(0)
        now += 10.0
    for seat in range(3):
        seats.end(now, seat, "died")
        seats.gone(seat, seats.generation(seat))
    assert (seats.pump(now), seats.exhausted, seats.next_deadline()) == ([], True, 60.0)
    assert (seats.due(60.0), len(seats.pump(60.0)), seats.exhausted, seats.next_deadline()) == ([], 1, False, 70.0)
    assert len(seats.pump(70.0)) == 1


def test_a_row_of_failed_starts_is_a_fault_and_a_success_in_between_is_not() -> None:
    seats = Seats(1, 60.0, 1000)
    lives = [False] * (START_FAILURES - 1) + [True] + [False] * START_FAILURES
    for number, was_ready in enumerate(lives, start=1):
        assert seats.fault is None and len(seats.pump(0.0)) == 1
        if was_ready:
            seats.ready(0)
        seats.end(0.0, 0, "exited with code 1")
        assert seats.gone(0, number)
    assert seats.fault is not None and "exited with code 1" in seats.fault.sentence and not seats.fault.user
    assert seats.pump(0.0) == []


def test_late_starts_and_unkillable_workers() -> None:
    seats = Seats(2, 60.0, 60)
    seats.pump(0.0)
    assert seats.due(59.9) == []
    assert seats.due(60.0) == [0, 1]
    seats.end(60.0, 0, "late")
    assert seats.phase(0) == SeatPhase.DYING and not seats.gone(0, 2)
    assert seats.due(60.0 + KILL_SECONDS) == []
    assert seats.fault is not None and "could not be killed" in seats.fault.sentence


def test_reasons_are_those_of_the_metrics() -> None:
    assert set(CLASS_OF) == set(GROUP_OF) == set(Reason)
    assert set(GROUP_OF.values()) == set(ENV_FAILURE_REASONS)
    assert {str(reason) for reason in KillReason} == set(ENV_KILL_REASONS)


def test_asserts_catch_our_own_mistakes() -> None:
    slots = Slots(1, 1)
    with pytest.raises(AssertionError):
        slots.free(0)
    with pytest.raises(AssertionError):
        slots.closing(0)
