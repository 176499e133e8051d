"""State seconds sum to elapsed time, exactly, whatever happens in between."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.metrics import ActivityClock, SlotClock, StateClock
from segue.metrics.vocabulary import OTHER, ROLLOUT_PRECEDENCE, STATE_MEANINGS, STATES


class FakeTime:
    """A clock that moves when told, in seconds."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


STEPS = st.floats(0, 1e4, allow_nan=False)


def nanoseconds(start: float, end: float) -> int:
    return round(end * 1e9) - round(start * 1e9)


def test_a_state_clock_charges_the_state_it_is_in() -> None:
    time = FakeTime()
    clock = StateClock(("dispatch", "wait_capacity", OTHER), time)
    time.now += 1.0
    clock.enter("dispatch")
    time.now += 2.5
    clock.enter("dispatch")
    time.now += 0.5
    clock.enter("wait_capacity")
    time.now += 4.0
    assert clock.seconds() == {"dispatch": 3.0, "wait_capacity": 4.0, OTHER: 1.0}
    assert clock.current() == {"dispatch": 0, "wait_capacity": 1, OTHER: 0}


def test_in_state_returns_to_the_state_before_also_after_an_error() -> None:
    time = FakeTime()
    clock = StateClock(STATES["learner"], time)
    clock.enter("compute")
    with pytest.raises(RuntimeError), clock.in_state("optimizer"):
        time.now += 2.0
        with clock.in_state("checkpoint"):
            time.now += 3.0
        assert clock.state == "optimizer"
        raise RuntimeError
    time.now += 1.0
    seconds = clock.seconds()
    assert (seconds["compute"], seconds["optimizer"], seconds["checkpoint"]) == (1.0, 2.0, 3.0)


def test_idleness_of_any_length_counts_in_full() -> None:
    """NeMo-RL's idle ratio is 0 exactly when idleness exceeds 0.1 s (monitoring reference); ours has no such cliff."""
    for idle in (0.05, 0.1, 0.11, 50.0):
        time = FakeTime()
        clock = StateClock(STATES["learner"], time)
        clock.enter("wait_batch")
        time.now += idle
        clock.enter("compute")
        time.now += 1.0
        assert clock.seconds()["wait_batch"] == pytest.approx(idle)


@given(st.lists(st.tuples(st.sampled_from(STATES["learner"]), STEPS), max_size=60))
def test_state_seconds_sum_to_elapsed_time(moves: list[tuple[str, float]]) -> None:
    time = FakeTime()
    start = time.now
    clock = StateClock(STATES["learner"], time)
    expected = dict.fromkeys(STATES["learner"], 0)
    state, last = OTHER, start
    for target, passed in moves:
        time.now += passed
        expected[state] += nanoseconds(last, time.now)
        state, last = target, time.now
        clock.enter(target)
    assert clock.nanoseconds() == expected
    assert sum(clock.nanoseconds().values()) == nanoseconds(start, time.now)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(ROLLOUT_PRECEDENCE), st.booleans(), STEPS), max_size=80))
def test_activities_are_charged_by_precedence_and_sum_to_elapsed_time(events: list[tuple[str, bool, float]]) -> None:
    time = FakeTime()
    start = time.now
    clock = ActivityClock(ROLLOUT_PRECEDENCE, time)
    active: list[str] = []
    expected = dict.fromkeys(STATES["rollout"], 0)
    for state, begins, passed in events:
        before = time.now
        time.now += passed
        holds = next((s for s in ROLLOUT_PRECEDENCE if s in active), OTHER)
        expected[holds] += nanoseconds(before, time.now)
        if begins:
            active.append(state)
            clock.begin(state)
        elif state in active:
            active.remove(state)
            clock.end(state)
        assert clock.active(state) == active.count(state)
    assert clock.nanoseconds() == expected
    assert sum(clock.nanoseconds().values()) == nanoseconds(start, time.now)
    assert sum(clock.current().values()) == 1


def test_a_waiting_episode_does_not_make_a_generating_node_idle() -> None:
    time = FakeTime()
    clock = ActivityClock(ROLLOUT_PRECEDENCE, time)
    clock.begin("wait_env")
    time.now += 1.0
    with clock.doing("generate"):
        time.now += 2.0
        clock.begin("wait_weights")
        time.now += 4.0
        clock.end("wait_weights")
    time.now += 8.0
    clock.end("wait_env")
    time.now += 16.0
    assert clock.seconds() == {"wait_weights": 4.0, "generate": 2.0, "wait_env": 9.0, "wait_admission": 0.0, OTHER: 16.0}


@settings(max_examples=40)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(STATES["envpool"]), STEPS), max_size=60),
)
def test_slot_seconds_sum_to_elapsed_time_times_slots(slots: int, moves: list[tuple[int, str, float]]) -> None:
    time = FakeTime()
    start = time.now
    clock = SlotClock(STATES["envpool"], slots, time, start="wait_action")
    states = ["wait_action"] * slots
    expected = dict.fromkeys(STATES["envpool"], 0)
    for slot, state, passed in moves:
        before = time.now
        time.now += passed
        for held in states:
            expected[held] += nanoseconds(before, time.now)
        states[slot % slots] = state
        clock.move(slot % slots, state)
        assert clock.state(slot % slots) == state
    assert clock.nanoseconds() == expected
    assert sum(clock.nanoseconds().values()) == slots * nanoseconds(start, time.now)
    assert clock.current() == {state: states.count(state) for state in STATES["envpool"]}


def test_a_clock_that_goes_back_books_nothing_twice() -> None:
    time = FakeTime()
    clock = StateClock(("a", OTHER), time, start="a")
    time.now += 5.0
    assert clock.seconds()["a"] == 5.0
    time.now -= 3.0
    assert clock.seconds()["a"] == 5.0
    time.now += 4.0
    assert clock.seconds()["a"] == 6.0


def test_unknown_states_and_unbalanced_ends_are_refused() -> None:
    time = FakeTime()
    with pytest.raises(ValueError, match="no such state: 'dance'"):
        StateClock(("a", OTHER), time).enter("dance")
    activity = ActivityClock(("a", "b"), time)
    with pytest.raises(ValueError, match="no such state"):
        activity.begin(OTHER)
    with pytest.raises(ValueError, match="no activity is in 'a'"):
        activity.end("a")
    with pytest.raises(ValueError, match="leave it out"):
        ActivityClock(("a", OTHER), time)
    with pytest.raises(ValueError, match="named twice"):
        StateClock(("a", "a"), time)
    with pytest.raises(ValueError, match="first state"):
        SlotClock(("a", "b"), 2, time, start="c")
    with pytest.raises(ValueError, match="measures nothing"):
        SlotClock(("a",), 0, time, start="a")


def test_a_restarted_clock_forgets_what_was_before() -> None:
    time = [0.0]
    clocks = (
        StateClock(("busy", "other"), lambda: time[0]),
        ActivityClock(("busy",), lambda: time[0]),
        SlotClock(("busy", "other"), 2, lambda: time[0], "other"),
    )
    time[0] = 5.0
    for clock in clocks:
        clock.restart()
    time[0] = 7.0
    assert [clock.seconds() for clock in clocks] == [{"busy": 0.0, "other": seconds} for seconds in (2.0, 2.0, 4.0)]


def test_every_state_has_a_meaning() -> None:
    assert {role: (*meanings, OTHER) for role, meanings in STATE_MEANINGS.items()} == STATES
