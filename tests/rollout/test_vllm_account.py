"""The books of the scheduler inside vLLM, and the records they travel in."""

from __future__ import annotations

from rollout.vllm.account import Account
from rollout.vllm.record import SCORE_PREFIX, Admitted, StepRecord


def test_a_context_is_booked_when_it_is_complete() -> None:
    """In pieces; its last token is decoded, not prefilled."""
    account = Account()
    account.admit("a", tokens=100, cached=32)
    account.scheduled([("a", 40)])
    step = account.take()
    assert (step.prefill_tokens, step.admitted) == (40, [])
    account.scheduled([("a", 28)])
    step = account.take()
    assert (step.prefill_tokens, step.admitted) == (27, [Admitted("a", 32, 67, False)])
    account.scheduled([("a", 1)])
    assert account.take() == StepRecord()


def test_what_was_filled_before_the_end_counts() -> None:
    account = Account()
    for name in ("preempted", "aborted"):
        account.admit(name, tokens=50, cached=0)
    account.scheduled([("preempted", 20), ("aborted", 10)])
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
    account.timed(10.0, 12.0, 0, True, True)
    account.finished(name)
    assert account.take() == StepRecord(score_seconds=2.0)


def test_steps_that_overlap_are_not_counted_twice_and_prefill_is_what_exceeds_decoding() -> None:
    account = Account()
    account.timed(0.0, 1.0, 0, True, False)
    account.timed(0.5, 2.0, 0, True, False)
    account.timed(2.0, 5.0, 7, True, False)
    account.timed(5.0, 6.0, 7, False, False)
    step = account.take()
    assert (step.seconds, step.prefill_seconds) == (6.0, 3.0)


def test_a_record_survives_its_journey_and_an_empty_one_is_nothing() -> None:
    assert StepRecord().encode() == {}
    assert StepRecord.decode({}) == StepRecord()
    step = StepRecord([Admitted("a", 1, 2, True)], ["b"], 3, 4, 5.0, 6.0, 7.0)
    assert StepRecord.decode(step.encode()) == step
