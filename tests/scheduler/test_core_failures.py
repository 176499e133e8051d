"""Failures: typed, with a budget per class; tasks that keep failing are set aside; starting from scratch is the last resort."""

from __future__ import annotations

import itertools

import pytest
from core_world import ModelLease, ModelNode, World, make_config, task

from scheduler.core import commands as c
from scheduler.core import events as e
from segue.episode import FailureClass, State, Task
from segue.ports.rollout import Paused, Resumed


def opened(**sections: object) -> tuple[World, ModelNode]:
    world = World(make_config(batch__groups=1, staleness__max_age=0, **sections))
    node = world.join("rollout-0", 2)
    world.update_all()
    world.send(e.TrainingOpened(1000))
    return world, node


def held(node: ModelNode, episode: int) -> ModelLease | None:
    return node.leases.get(episode)


@pytest.mark.parametrize(("failure", "budget"), [("infra", 3), ("env", 2), ("data", 0)])
def test_each_class_has_its_own_budget_and_retries_count_attempts(failure: str, budget: int) -> None:
    world, node = opened()
    for attempt in range(1, budget + 2):
        lease = held(node, 0)
        assert lease is not None and lease.grant.attempt == attempt
        world.fail(node, lease, failure)
        world.rest()
    assert held(node, 0) is None
    assert world.core.tables.episodes.failed[FailureClass(failure)] == 1
    assert world.tally("retries", failure) == budget


def test_budgets_do_not_mix() -> None:
    world, node = opened()
    for failure in ("infra", "env", "infra", "env", "infra"):
        lease = held(node, 0)
        assert lease is not None
        world.fail(node, lease, failure)
        world.rest()
    assert held(node, 0) is not None


def test_an_attempt_that_got_nowhere_is_tried_again_after_a_pause_that_doubles() -> None:
    """An env pool that is being restarted fails every attempt at once: the budget must outlive that."""
    world, node = opened()
    failed_at = []
    while (lease := held(node, 0)) is not None:
        failed_at.append(world.now)
        world.fail(node, lease, "infra", "pool lost")
        while held(node, 0) is None and world.now < 60.0 and not world.tally("tasks_reissued"):
            world.rest(0.5)
        if world.core.tables.episodes.failed[FailureClass.INFRA]:
            break
    pauses = [b - a for a, b in itertools.pairwise(failed_at)]
    assert pauses == [2.0, 4.0, 8.0]


def test_an_attempt_that_got_somewhere_is_tried_again_at_once() -> None:
    world, node = opened()
    world.delta(node, node.leases[0])
    world.fail(node, node.leases[0], "env")
    assert node.leases[0].grant.attempt == 2


def test_a_resting_episode_falls_with_its_group() -> None:
    world, node = opened()
    world.fail(node, node.leases[0], "infra")
    assert world.core.tables.episodes.live[0].resting
    world.fail(node, node.leases[1], "data")
    assert 0 not in world.core.groups.live
    world.rest()
    world.drain(2)


def test_reasons_from_nodes_do_not_grow_the_tally_without_end() -> None:
    world, node = opened(scheduler__retries_infra=100_000)
    for number in range(200):
        lease = node.leases[0]
        world.delta(node, lease)
        world.fail(node, lease, "infra", f"line {number} of a stack trace")
    reasons = [key for key in world.core.tables.tally if key[0] == "attempts_failed"]
    assert len(reasons) == 65 and world.tally("attempts_failed", "infra", "other") == 136


def test_an_unknown_class_counts_as_infrastructure() -> None:
    world, node = opened()
    lease = held(node, 0)
    assert lease is not None
    world.fail(node, lease, "cosmic rays")
    assert world.tally("attempts_failed", "infra", "crashed") == 1


def test_f69_a_failure_is_never_a_reward() -> None:
    """The failed member is absent from its group; the others ship without it."""
    world = World(make_config(batch__groups=1, staleness__max_age=0, group__size=3))
    node = world.join("rollout-0", 3)
    world.update_all()
    world.send(e.TrainingOpened(1000))
    world.fail(node, node.leases[0], "data")
    for episode in (1, 2):
        world.delta(node, node.leases[episode], reward=float(episode))
        world.finish(node, node.leases[episode])
    assert [m.reward for m in world.plans[0].groups[0].members] == [1.0, 2.0]
    assert world.core.tables.episodes.counts[State.FAILED] == 1


def test_f58_a_task_that_keeps_failing_is_set_aside_named_and_replaced() -> None:
    world, node = opened()
    first = node.leases[0].grant.task
    world.fail(node, node.leases[0], "data", "no such file")
    assert list(world.core.failures.quarantined) == [first.id]
    assert any(first.id in warning and "no such file" in warning for warning in world.warnings)
    assert world.tally("tasks_quarantined", "latency") == 1
    world.drain(3)
    before = len(world.core.admission.tasks)
    world.send(e.TasksArrived([first]))
    assert len(world.core.admission.tasks) == before, "when it comes round again it is passed over"
    assert world.tally("tasks_passed_over") == 1


def test_too_many_such_tasks_end_the_run() -> None:
    world, node = opened(scheduler__max_quarantined=2)
    for _ in range(3):
        assert not world.fatals
        world.fail(node, next(iter(node.leases.values())), "data", "broken")
    (fatal,) = world.fatals
    assert "3 tasks failed on every attempt" in fatal.sentence and "scheduler.max_quarantined" in fatal.remedy
    assert fatal.users, "what environments and data do is the user's to mend"


def test_what_the_environment_raised_is_said_and_the_limit_comes_last() -> None:
    world, node = opened(scheduler__max_quarantined=4, scheduler__retries_env=0)
    for _ in range(5):
        world.fail(node, next(iter(node.leases.values())), "env", "env_error", "KeyError: 'oops' in bugs.py:10")
    (fatal,) = world.fatals
    assert fatal.sentence.endswith("the last with KeyError: 'oops' in bugs.py:10 (env: env_error)")
    assert fatal.remedy == "mend the environment or its data, or raise scheduler.max_quarantined"
    first, *more = world.warnings
    assert first.endswith("is set aside: KeyError: 'oops' in bugs.py:10 (env: env_error).")
    assert [warning.split()[0] for warning in more] == ["2", "4"], "not one near-identical warning per task"


def test_what_the_machinery_does_is_not_the_users_to_mend() -> None:
    world, node = opened(scheduler__max_quarantined=1, scheduler__retries_infra=0)
    while not world.fatals:
        world.fail(node, next(iter(node.leases.values())), "infra")
    assert not world.fatals[0].users and world.fatals[0].sentence.endswith("or raise scheduler.max_quarantined.")


def test_an_evaluation_says_why_its_episodes_failed() -> None:
    world, node = opened(scheduler__retries_env=0)
    world.drain(1)
    world.send(e.EvalStarted("before", [Task("a", "latency", 0), Task("b", "latency", 0)], 0.0))
    evals = [lease for lease in node.leases.values() if lease.grant.purpose == "eval"]
    world.fail(node, evals[0], "env", "env_error", "KeyError: 'oops' in bugs.py:10")
    run = world.core.eval_run("before")
    assert run is not None and run.example == "KeyError: 'oops' in bugs.py:10 (env: env_error)" and run.users


def test_when_every_task_is_set_aside_the_run_ends_instead_of_asking_for_ever() -> None:
    world = World(make_config(batch__groups=1, staleness__max_age=0, scheduler__max_quarantined=1000), task_count=4)
    node = world.join("rollout-0", 2)
    world.update_all()
    world.send(e.TrainingOpened(1000))
    while node.leases:
        world.fail(node, next(iter(node.leases.values())), "data", "broken")
    assert "All 4 tasks failed on every attempt" in world.fatals[0].sentence
    assert not world.wanted_tasks


def test_a_task_lost_to_the_machinery_is_issued_again_and_only_then_set_aside() -> None:
    world, node = opened(scheduler__retries_infra=0)
    first = node.leases[0].grant.task.id
    for issue in range(3):
        lease = next(iter(node.leases.values()))
        assert lease.grant.task.id == first, f"issue {issue}"
        assert not world.core.failures.quarantined
        world.fail(node, lease, "infra")
    assert list(world.core.failures.quarantined) == [first]
    assert world.tally("tasks_reissued") == 2
    assert next(iter(node.leases.values())).grant.task.id != first


def test_starting_from_scratch_is_the_last_resort_and_counted() -> None:
    """Only when the environment could not be restored on the last retry: its saved state may be what is broken."""
    world, node = opened(scheduler__retries_env=2)
    world.delta(node, node.leases[0], tokens=7)
    world.fail(node, node.leases[0], "env", "crash")
    assert node.leases[0].seq == 1, "the first retry goes on from the log"
    world.fail(node, node.leases[0], "env", "restore")
    world.rest()
    assert node.leases[0].seq == 0, "the second, which got no further, begins anew"
    tally = world.core.tables.tally
    assert tally["regenerated", "restore"] == 1 and tally["tokens_discarded",] == 7
    assert repr(c.Forget(0)) in world.trace
    world.delta(node, node.leases[0], tokens=2, reward=1.0)
    world.finish(node, node.leases[0])
    world.delta(node, node.leases[1])
    world.finish(node, node.leases[1])
    assert (world.plans[0].trainable, world.plans[0].groups[0].members[0].reward) == (3, 1.0)


def test_an_attempt_that_made_progress_is_never_begun_anew() -> None:
    world, node = opened(scheduler__retries_env=1)
    world.delta(node, node.leases[0])
    world.fail(node, node.leases[0], "env", "crash")
    assert node.leases[0].seq == 1
    assert not world.tally("regenerated", "crash")


def test_moves_are_counted_by_their_reason() -> None:
    world = World(make_config(batch__groups=1, staleness__max_age=3))
    first, second = world.join("rollout-0", 2), world.join("rollout-1", 8)
    world.update_all()
    world.send(e.TrainingOpened(1000))
    moved = list(first.leases.values())
    for lease in moved:
        world.delta(first, lease)
    world.send(e.NodeLost("rollout-0", first.session, "killed"))
    assert all(lease.grant.episode in second.leases for lease in moved)
    assert world.tally("migrated", "node_lost") == len(moved)


def test_an_evaluation_episode_that_fails_for_good_counts_as_failed() -> None:
    world, node = opened()
    world.send(e.EvalStarted("x", [task(1), task(2)], 0.0))
    for episode in list(node.leases):
        world.finish(node, node.leases[episode])
    evals = [lease for lease in node.leases.values() if lease.grant.purpose == "eval"]
    world.fail(node, evals[0], "data")
    world.finish(node, evals[1])
    run = world.core.eval_run("x")
    assert run is not None and (run.n, run.finished, run.failed, run.done) == (2, 1, 1, True)
    assert world.core.tables.episodes.failed[FailureClass.DATA] == 0, "counted apart"


def test_pauses_and_resumes_are_counted_by_reason() -> None:
    world, node = opened()
    lease = node.leases[0]
    world.send(Paused(*lease.key, "update"))
    world.send(Resumed(*lease.key))
    world.send(Paused(*lease.key, "boredom"))
    tally = world.core.tables.tally
    assert (tally["paused", "update"], tally["resumed",], tally["refused", "unexpected"]) == (1, 1, 1)
    assert ("paused", "boredom") not in tally
