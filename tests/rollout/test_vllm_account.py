"""The books of the scheduler inside vLLM, the records they travel in, and how a step's seconds divide."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.vllm.account import Account
from rollout.vllm.pace import Pace, nonnegative
from rollout.vllm.record import SCORE_PREFIX, Admitted, StepRecord


def test_a_context_is_booked_when_it_is_complete() -> None:
    """In pieces; its last token is decoded, not prefilled."""
    account = Account()
    account.admit("a", tokens=100, cached=32)
    account.scheduled([("a", 40)])
    account.computed(0.0, 1.0, 40, 0, False)
    step = account.take()
    assert (step.prefill_tokens, step.admitted) == (40, [])
    account.scheduled([("a", 28)])
    account.computed(1.0, 2.0, 28, 1, False)
    step = account.take()
    assert (step.prefill_tokens, step.admitted) == (27, [Admitted("a", 32, 67, False)])
    account.scheduled([("a", 1)])
    assert account.take() == StepRecord()


def test_what_was_filled_before_the_end_counts() -> None:
    account = Account()
    for name in ("preempted", "aborted"):
        account.admit(name, tokens=50, cached=0)
    account.scheduled([("preempted", 20), ("aborted", 10)])
    account.computed(0.0, 1.0, 30, 0, False)
    account.preempted("preempted")
    account.aborted("aborted")
    step = account.take()
    assert step.prefill_tokens == 30 and step.preemptions == 1 and step.ended == ["aborted"]
    assert step.admitted == [Admitted("preempted", 0, 20, False), Admitted("aborted", 0, 10, False)]
    account.admit("preempted", tokens=50, cached=16)
    account.scheduled([("preempted", 34)])
    assert account.take().admitted == [Admitted("preempted", 16, 33, True)]
    account.finished("preempted")
    account.admit("preempted", tokens=2, cached=0)
    account.scheduled([("preempted", 2)])
    assert account.take().admitted == [Admitted("preempted", 0, 1, False)], "a new request of the same name"


def test_scored_sequences_are_only_timed() -> None:
    account = Account()
    name = SCORE_PREFIX + "1"
    account.admit(name, tokens=50, cached=0)
    account.scheduled([(name, 50)])
    account.computed(10.0, 12.0, 50, 1, True)
    account.finished(name)
    assert account.take() == StepRecord(score_seconds=2.0)


def test_steps_that_overlap_are_not_counted_twice() -> None:
    account = Account()
    account.computed(0.0, 1.0, 3, 3, False)
    account.computed(0.5, 2.0, 3, 3, False)
    account.computed(5.0, 6.0, 7, 0, False)
    account.looked_up(4, 5)
    step = account.take()
    assert (step.seconds, step.prefill_seconds, step.prefill_tokens) == (3.0, 1.0, 7)
    assert (step.cached_tokens, step.refilled_tokens) == (4, 5)


def test_the_seconds_of_mixed_steps_are_divided_as_the_work_was() -> None:
    """2 ms a step, 0.1 ms a context token, 0.5 ms a row, and 20 % of noise: the whole within 3 %, and all sums hold."""
    rng = random.Random(1)
    pace = Pace()
    true = measured = 0.0
    for _ in range(4000):
        rows = rng.randint(0, 32)
        prefill = rng.randint(1, 400) if rng.random() < 0.2 else 0
        if not prefill and not rows:
            continue
        filling = 0.0001 * prefill
        noise = rng.uniform(0.8, 1.2)
        seconds = (0.002 + filling + 0.0005 * rows) * noise
        pace.observe(seconds, prefill, rows)
        share = pace.prefill_seconds(seconds, prefill, rows)
        assert 0.0 <= share <= seconds and (rows > 0 or share == seconds) and (prefill > 0 or share == 0.0)
        true += seconds if not rows else filling * noise
        measured += share
    assert measured == pytest.approx(true, rel=0.03)


def test_a_pace_that_knows_nothing_divides_by_tokens() -> None:
    assert Pace().prefill_seconds(1.0, 30, 10) == 0.75


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_a_fit_is_no_worse_than_any_other_that_is_not_negative(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.uniform(0, 1, (n, 3)), rng.normal(0.3, 1, n)
    found = np.array(nonnegative((x.T @ x).tolist(), (x.T @ y).tolist()))
    assert (found >= 0).all()
    error = np.sum((y - x @ found) ** 2)
    for other in (*np.eye(3), np.zeros(3), *rng.uniform(0, 1, (20, 3)), *np.abs(found + rng.normal(0, 0.01, (20, 3)))):
        assert error <= np.sum((y - x @ other) ** 2) + 1e-7 * (1 + error)


def test_a_record_survives_its_journey_and_an_empty_one_is_nothing() -> None:
    assert StepRecord().encode() == {}
    assert StepRecord.decode({}) == StepRecord()
    step = StepRecord([Admitted("a", 1, 2, True)], ["b"], 3, 4, 5, 6, 7.0, 8.0, 9.0)
    assert StepRecord.decode(step.encode()) == step
