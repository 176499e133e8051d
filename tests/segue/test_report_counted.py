"""What a step's line says of the roles, from what they had counted at its two ends."""

from __future__ import annotations

from exported_run import ENV, Exported

from segue.metrics.samples import difference
from segue.metrics.vocabulary import PREFILL_CAUSES
from segue.report.counted import NAMES, counted


def test_a_line_has_what_grew_since_the_step_before() -> None:
    exported = Exported()
    exported.work(100.0)
    exported.pool.observe("segue_env_step_seconds", 400.0, env=ENV)
    before = exported.counts()
    exported.work(4.0)
    told = counted(difference(before, exported.counts()))
    assert told["state_seconds"] == {
        "scheduler": {"wait_capacity": 4.0},
        "rollout": {"generate": 6.0, "wait_env": 2.0},
        "envpool": {"wait_action": 16.0},
        "learner": {"wait_batch": 2.0, "compute": 2.0},
    }
    assert told["prefill_tokens"] == dict.fromkeys(PREFILL_CAUSES, 0) | {"turn": 240, "weight_update": 80}
    assert told["decode_tokens"] == 800
    assert 0.1 < told["env_step_p50_seconds"] < told["env_step_p95_seconds"] <= 0.25


def test_of_roles_that_did_not_answer_nothing_is_said() -> None:
    exported = Exported()
    exported.work(2.0)
    learner = {"learner-0": exported.counts()["learner-0"]}
    told = counted(difference({}, learner))
    assert set(told["state_seconds"]) == {"learner"}
    assert [told[key] for key in ("prefill_tokens", "decode_tokens", "env_step_p50_seconds", "env_step_p95_seconds")] == [
        None
    ] * 4
    assert set(counted({}).values()) == {None}


def test_what_is_asked_for_is_all_that_is_needed() -> None:
    exported = Exported()
    before, whole = exported.counts(), exported.scrape()
    exported.work(2.0)
    assert counted(difference(before, exported.counts())) == counted(difference(whole, exported.scrape()))
    assert sum(map(len, before.values())) < 0.2 * sum(map(len, whole.values())), "few of all that there is"
    assert len(NAMES) == 4
