"""The pool's core, scenario by scenario, without time, processes or an event loop."""

from __future__ import annotations

import msgspec
import pytest
from core_harness import Table
from faulty_suite import FaultyArgs, FaultySuite

from envpool.messages import Act, Acted, Dispose, Make
from segue.episode import ActionRecord, Task
from segue.ports.envpool import Close, Create, Created, EnvFailed, Restore, Resume, Step, Stepped, observation_digest


def running(table: Table, *episodes: int) -> None:
    """Episodes whose instances are ready."""
    for episode in episodes:
        table.create(episode)
    table.work()
    assert all(isinstance(reply, Created) for reply in table.taken())


def test_an_episode_from_create_to_close() -> None:
    table = Table()
    table.create(1)
    table.work()
    created = table.reply()
    assert isinstance(created, Created) and created.snapshot is not None
    for step in range(3):
        table.step(1, step, f"say {step}")
        table.work()
        stepped = table.reply()
        assert isinstance(stepped, Stepped) and stepped.step == step and stepped.result.reward == step + 1
    table.close(1)
    assert table.pool.status()["slots"] == {"free": 1, "starting": 0, "leased": 0, "dying": 1}
    table.work()
    assert table.pool.status()["slots"]["free"] == 2 and table.taken() == []


def test_a_repeated_request_gets_the_stored_reply_and_runs_once() -> None:
    """At most once: tools with effects must not run twice."""
    table = Table()
    table.create(1)
    table.create(1)
    table.work()
    first = table.reply()
    table.create(1)
    assert table.reply() == first
    table.step(1, 0)
    table.step(1, 0)  # while it runs: its reply will do for both
    table.work()
    stepped = table.reply()
    for _ in range(3):
        table.step(1, 0, "something else")
        assert table.reply() == stepped and not table.calls
    table.step(1, 1)
    table.work()
    assert table.reply().result.reward == 2.0
    assert table.metrics.value("segue_messages_refused_total", reason="duplicate") == 6


def test_replies_are_kept_until_accepted() -> None:
    table = Table()
    running(table, 1)
    for step in range(3):
        table.step(1, step)
        table.work()
    third = table.taken()[2]
    table.accepted(1, 1)
    table.step(1, 2)
    assert table.reply() == third
    for step in (0, 1):
        table.step(1, step)
        refused = table.reply()
        assert (refused.failure, refused.reason) == ("infra", "refused_stale")
    table.create(1)
    assert table.reply().reason == "refused_stale"
    table.step(1, 3)
    table.work()
    assert isinstance(table.reply(), Stepped)


def test_a_new_attempt_ends_the_old_one_and_its_late_messages_are_refused() -> None:
    """F74: fenced by (episode, attempt, step)."""
    table = Table()
    running(table, 1)
    table.step(1, 0, "slow")
    seat, generation, late = table.calls.pop()
    table.create(1, attempt=2)
    table.work()
    assert isinstance(table.reply(), Created)
    table.do(table.pool.worker_said(table.now, seat, generation, Acted(late.instance, late.call, _result(table), None)))
    table.work()
    assert table.taken() == [], "the old attempt's reply is no one's"
    for request in (Create(1, 1, Task("t", "faulty", 1), 0), Step(1, 1, 0, "x"), Step(1, 1, 1, "x")):
        table.submit(request)
        reply = table.reply()
        assert (reply.attempt, reply.reason) == (1, "refused_stale")
    assert table.metrics.value("segue_messages_refused_total", reason="stale_attempt") == 3
    table.submit(Close(1, 1))
    table.step(1, 0, attempt=2)
    table.work()
    assert isinstance(table.reply(), Stepped)


def _result(table: Table):  # type: ignore[no-untyped-def]
    environment = table.suite.make(Task("t", "faulty", 1), 0)
    return environment.step("late")


def test_replies_that_match_no_running_call_are_refused_and_counted() -> None:
    """F74: a reply shifted by one would be the previous step's."""
    table = Table()
    running(table, 1)
    table.step(1, 0)
    seat, generation, call = table.calls.pop()
    reply = table.perform(call)
    assert isinstance(reply, Acted)
    for wrong in (
        msgspec.structs.replace(reply, call=reply.call - 1),
        msgspec.structs.replace(reply, call=reply.call + 1),
        msgspec.structs.replace(reply, instance=99),
    ):
        table.do(table.pool.worker_said(table.now, seat, generation, wrong))
    table.do(table.pool.worker_said(table.now, seat, generation + 1, reply))
    assert table.taken() == []
    table.do(table.pool.worker_said(table.now, seat, generation, reply))
    assert isinstance(table.reply(), Stepped)
    table.do(table.pool.worker_said(table.now, seat, generation, reply))
    assert table.taken() == []
    assert table.metrics.value("segue_messages_refused_total", reason="unexpected") == 5


@pytest.mark.parametrize(
    ("until", "seconds", "reason"),
    [(Make, 30.0, "create_timeout"), (None, 20.0, "reset_timeout"), (Act, 10.0, "step_timeout")],
)
def test_each_phase_has_its_own_deadline_and_expiry_kills_the_worker(until: type | None, seconds: float, reason: str) -> None:
    table = Table()
    running(table, 2)
    if until is Act:
        running(table, 1)
        table.step(1, 0)
    else:
        table.create(1)
        if until is None:
            table.say(*table.calls.pop())
    table.step(2, 0)
    bystander = table.calls.pop()
    table.say(*bystander)
    table.taken()
    table.at(seconds - 0.01)
    assert table.taken() == [] and table.killed == []
    table.at(seconds)
    failed = table.reply()
    assert (failed.failure, failed.reason, len(table.killed)) == ("env", reason, 1)
    assert table.pool.status()["slots"]["dying"] == 2
    table.step(2, 1)
    bystander_failed = table.reply()
    assert (bystander_failed.failure, bystander_failed.reason, bystander_failed.step) == ("infra", "worker_killed", 1)
    table.gone()
    assert table.pool.status()["slots"]["starting"] == 2 and table.spawned[0].generation == 2
    table.ready()
    assert table.pool.status()["slots"]["free"] == 2
    assert table.metrics.value("segue_env_timeouts_total") == 1
    assert table.metrics.value("segue_env_kills_total", reason=reason) == 1
    assert table.metrics.value("segue_env_failures_total", **{"class": "env"}) == 1
    assert table.metrics.value("segue_env_failures_total", **{"class": "infra"}) == 1


def test_a_worker_killed_while_others_wait_in_it_fails_them_at_once() -> None:
    table = Table(instances=3)
    running(table, 1, 2, 3)
    table.step(1, 0)
    table.at(5.0)
    table.step(2, 0)
    table.at(10.0)
    replies = {reply.episode: reply.reason for reply in table.taken()}
    assert replies == {1: "step_timeout", 2: "worker_killed"}


def test_a_worker_that_dies_fails_its_waiters_at_once() -> None:
    table = Table(instances=3)
    running(table, 1, 2)
    table.step(1, 0)
    table.create(3)
    table.lose(detail="exited with code 7")
    replies = {reply.episode: reply for reply in table.taken()}
    assert {e: (r.failure, r.reason) for e, r in replies.items()} == {1: ("infra", "worker_died"), 3: ("infra", "worker_died")}
    assert "exited with code 7" in replies[1].detail
    table.step(2, 0)
    assert table.reply().reason == "worker_killed"
    assert table.metrics.value("segue_env_crashes_total") == 1
    table.gone()
    table.ready()
    table.create(1, attempt=2)
    table.work()
    assert isinstance(table.reply(), Created)


def test_creates_wait_for_a_slot_and_then_fail_for_want_of_one() -> None:
    table = Table(instances=1)
    running(table, 1)
    table.create(2)
    table.create(3)
    assert not table.calls
    table.at(10.0)
    table.close(1)
    table.work()
    assert table.reply().episode == 2
    table.at(29.0)
    assert table.taken() == []
    table.at(30.0)
    failed = table.reply()
    assert (failed.episode, failed.failure, failed.reason) == (3, "infra", "no_capacity")
    assert table.metrics.value("segue_queue_depth", queue="requests") == 0


def test_a_create_closed_while_it_waits_for_a_slot_is_forgotten() -> None:
    table = Table(instances=1)
    running(table, 1)
    table.create(2)
    table.close(2)
    table.close(1)
    table.work()
    assert table.taken() == [] and table.pool.status()["slots"]["free"] == 1
    table.create(2)  # the same attempt again, resent by a node that had not heard of the acknowledgement
    assert table.reply().reason == "refused_stale"


@pytest.mark.parametrize("calls_done", [0, 1])
def test_cancel_during_create_owns_the_creation_to_its_end(calls_done: int) -> None:
    """F71: the worker is still making or resetting the environment when its episode is closed."""
    table = Table()
    table.create(1)
    for _ in range(calls_done):
        table.say(*table.calls.pop())
    table.close(1)
    assert len(table.calls) == 1 and not isinstance(table.calls[0][2], Dispose)
    assert table.pool.status()["slots"]["free"] == 1
    table.say(*table.calls.pop())
    assert isinstance(table.calls[0][2], Dispose)
    table.work()
    assert table.pool.status()["slots"]["free"] == 2 and table.taken() == []


def test_a_close_that_overtook_its_create_still_closes_it() -> None:
    table = Table()
    table.close(1)
    table.create(1)
    assert table.reply().reason == "refused_stale" and not table.calls
    table.create(1, attempt=2)
    table.work()
    assert isinstance(table.reply(), Created)


def test_a_hanging_abandoned_call_still_has_its_deadline() -> None:
    table = Table()
    running(table, 1)
    table.step(1, 0)
    table.close(1)
    table.at(10.0)
    assert len(table.killed) == 1 and table.taken() == []


def test_a_close_that_hangs_costs_the_worker_but_no_reply() -> None:
    table = Table()
    running(table, 1)
    table.close(1)
    table.at(4.9)
    assert table.killed == []
    table.at(5.0)
    assert len(table.killed) == 1 and table.taken() == []
    assert table.metrics.value("segue_env_kills_total", reason="close_timeout") == 1


def test_an_instance_nobody_asks_for_any_more_is_closed() -> None:
    table = Table()
    running(table, 1)
    table.at(299.0)
    assert table.pool.status()["slots"]["leased"] == 1
    table.at(300.0)
    table.work()
    assert table.pool.status()["slots"]["free"] == 2 and table.taken() == []
    table.step(1, 0)
    assert table.reply().reason == "idle_timeout"


@pytest.mark.parametrize(("action", "failure"), [("raise", "env"), ("data", "data"), ("garbage", "env"), ("both", "env")])
def test_an_instance_that_raised_is_destroyed_not_reused(action: str, failure: str) -> None:
    """F64, F68, F69, F81: a typed failure and no reward; the other instance does not notice."""
    table = Table()
    running(table, 1, 2)
    table.step(1, 0, action)
    table.say(*table.calls.pop())
    failed = table.reply()
    assert isinstance(failed, EnvFailed) and (failed.failure, failed.reason) == (failure, f"{failure}_error")
    assert isinstance(table.calls[0][2], Dispose)
    table.work()
    assert table.pool.status()["slots"]["free"] == 1
    table.step(1, 0, action)
    assert table.reply().reason == f"{failure}_error"
    table.step(2, 0)
    table.work()
    assert isinstance(table.reply(), Stepped)


def test_a_reset_that_raises_gives_its_slot_back() -> None:
    table = Table(FaultySuite(FaultyArgs(reset="raise")), instances=1)
    for attempt in range(1, 4):
        table.create(1, attempt)
        table.work()
        assert table.reply().reason == "env_error"
    assert table.pool.status()["slots"]["free"] == 1


def test_steps_out_of_order_fail_the_attempt() -> None:
    for steps in ([1], [0, 2]):
        table = Table()
        running(table, 1)
        for step in steps:
            table.step(1, step)
        table.work()
        assert table.taken()[-1].reason == "out_of_order"
        assert table.pool.status()["slots"]["free"] == 2


def test_steps_of_unknown_instances_are_answered() -> None:
    """A pool that was started anew knows nobody; the node must hear it."""
    table = Table()
    table.step(5, 3)
    failed = table.reply()
    assert (failed.episode, failed.step, failed.failure, failed.reason) == (5, 3, "infra", "unknown_instance")


def test_a_new_session_closes_what_the_old_one_left_and_old_messages_are_refused() -> None:
    table = Table()
    running(table, 1)
    table.step(1, 0)
    table.submit(Create(2, 1, Task("t", "faulty", 2), 0), session=2)
    table.work()
    assert [(session, type(reply)) for _, session, reply in table.replies] == [(2, Created)]
    table.taken()
    table.submit(Step(1, 1, 1, "x"), Step(1, 1, 1, "x"), session=1)
    assert table.taken() == [] and table.metrics.value("segue_messages_refused_total", reason="stale_session") == 2
    assert table.pool.status()["instances"]["idle"] == 1
    table.do(table.pool.node_lost(table.now, "n0"))
    table.work()
    assert table.pool.status()["slots"]["free"] == 2


def _played(table: Table, actions: list[str]) -> tuple[list[ActionRecord], list[bytes]]:
    running(table, 1)
    records, snapshots = [], []
    for step, action in enumerate(actions):
        table.step(1, step, action)
        table.work()
        reply = table.reply()
        records.append(ActionRecord(action, observation_digest(reply.result.observation)))
        snapshots.append(reply.snapshot)
    return records, snapshots


@pytest.mark.parametrize("resume", ["snapshot", "replay"])
@pytest.mark.parametrize("stored", [-1, 0, 2, 3])
def test_restore_goes_on_at_the_last_recorded_turn(resume: str, stored: int) -> None:
    """From the newest stored snapshot (turn `stored`), then by replay of what came after it."""
    table = Table(FaultySuite(FaultyArgs(resume=resume)))
    actions = [f"say {k}" for k in range(4)]
    records, snapshots = _played(table, actions)
    if resume == "replay":
        assert snapshots == [None] * 4
        restore = Restore(None, -1, records)
    else:
        restore = Restore(snapshots[stored] if stored >= 0 else None, stored, records[stored + 1 :])
    table.create(1, attempt=2, restore=restore)
    table.work()
    created = table.reply()
    assert isinstance(created, Created) and created.observation.messages[0].content == "4: say 3"
    assert (created.snapshot is None) == (resume == "replay") and (resume == "replay" or created.snapshot == snapshots[3])
    table.step(1, 4, "say 4", attempt=2)
    table.work()
    assert table.reply().result.reward == 5.0


def test_a_replay_that_observes_something_else_is_an_env_failure() -> None:
    table = Table(FaultySuite(FaultyArgs(resume="replay")), snapshot_bytes=0)
    records, _ = _played(table, ["a", "b", "c"])
    records[1] = msgspec.structs.replace(records[1], observation_hash=records[1].observation_hash ^ 1)
    table.create(1, attempt=2, restore=Restore(None, -1, records))
    table.work()
    failed = table.reply()
    assert (failed.failure, failed.reason) == ("env", "restore_mismatch") and "turn 1" in failed.detail
    assert table.pool.status()["slots"]["free"] == 2


def test_each_replayed_step_has_the_deadline_of_a_step() -> None:
    table = Table(FaultySuite(FaultyArgs(resume="replay")))
    records, _ = _played(table, ["a", "b", "c"])
    table.create(1, attempt=2, restore=Restore(None, -1, records))
    while not isinstance(table.calls[0][2], Act):
        table.say(*table.calls.pop(0))
    for number in (1, 2):
        table.at(9.9 * number)
        table.say(*table.calls.pop(0))
    table.at(9.9 * 2 + 10.0)
    assert table.reply().reason == "step_timeout"


def test_a_pinned_environment_says_that_it_cannot_be_rebuilt() -> None:
    table = Table(FaultySuite(FaultyArgs(resume="pinned")))
    records, _ = _played(table, ["a"])
    table.create(1, attempt=2, restore=Restore(None, -1, records))
    table.work()
    assert table.reply().reason == "not_resumable"
    table.create(1, attempt=3, restore=Restore(None, -1, []))
    table.work()
    created = table.reply()
    assert isinstance(created, Created), "nothing had happened yet: a reset is as good"


@pytest.mark.parametrize("resume", list(Resume))
def test_created_says_how_the_environment_can_be_rebuilt(resume: Resume) -> None:
    table = Table(FaultySuite(FaultyArgs(resume=resume)))
    table.create(1)
    table.work()
    assert table.reply().resume is resume


def test_effects_have_the_same_key_in_every_attempt() -> None:
    """A later attempt replays old turns, and runs one again whose observation was lost: they are the effects they were."""
    suite = FaultySuite(FaultyArgs(resume="replay"))
    table = Table(suite)
    records, _ = _played(table, ["a", "b"])
    first = list(suite.keys)
    table.create(1, attempt=2, restore=Restore(None, -1, records[:1]))
    table.work()
    table.step(1, 1, "b", attempt=2)  # its observation had been lost
    table.work()
    assert isinstance(table.taken()[-1], Stepped)
    assert suite.keys[2:] == first and len(set(first)) == 2


def test_no_action_has_the_key_of_another() -> None:
    """Another turn, another episode; and an action that was sampled in place of one that was lost."""
    suite = FaultySuite(FaultyArgs(resume="replay"))
    table = Table(suite)
    running(table, 1, 2)
    for episode, attempt, step, action in ((1, 1, 0, "a"), (1, 1, 1, "a"), (2, 1, 0, "a")):
        table.step(episode, step, action, attempt)
        table.work()
    table.create(1, attempt=2)
    table.work()
    table.step(1, 0, "b", attempt=2)
    table.work()
    assert len(suite.keys) == len(set(suite.keys)) == 4


def test_members_of_a_group_must_see_the_same_first_observation() -> None:
    """F75: an environment whose reset ignores its seed is found out at the second member."""
    table = Table(FaultySuite(FaultyArgs(reset="random")))
    task = Task("one", "faulty", 7)
    table.create(1, task=task)
    table.work()
    assert isinstance(table.reply(), Created)
    table.create(2, task=task)
    table.work()
    failed = table.reply()
    assert (failed.failure, failed.reason) == ("env", "seed_mismatch")
    table.create(3, task=Task("two", "faulty", 7))
    table.work()
    assert isinstance(table.reply(), Created)


def test_snapshots_above_the_limit_are_not_sent() -> None:
    table = Table(snapshot_bytes=100)
    running(table, 1)
    for step, (action, sent) in enumerate([("big 100", True), ("big 101", False)]):
        table.step(1, step, action)
        table.work()
        assert (table.reply().snapshot is not None) == sent


def test_creates_before_the_first_worker_is_ready_wait_for_it() -> None:
    table = Table(start=False)
    table.create(1)
    assert table.calls == [] and table.taken() == []
    table.ready()
    table.work()
    assert isinstance(table.reply(), Created)


def test_when_workers_die_again_and_again_creates_fail_and_say_so() -> None:
    table = Table(respawns_per_minute=2)
    for attempt in range(1, 4):
        running_again = attempt
        table.create(1, running_again)
        table.work()
        table.taken()
        table.step(1, 0, attempt=attempt)
        table.lose(detail="exited with code 9")
        assert table.reply().reason == "worker_died"
        table.gone()
        table.ready()
    table.create(1, 4)
    failed = table.reply()
    assert (failed.failure, failed.reason) == ("infra", "respawn_limit") and "exited with code 9" in failed.detail
    table.at(60.0)
    table.ready()
    table.create(1, 5)
    table.work()
    assert isinstance(table.reply(), Created)


def test_a_fault_fails_all_creates_at_once() -> None:
    table = Table(start=False, workers=3)
    table.create(1)
    for spawn in table.spawned[:3]:
        table.do(table.pool.worker_lost(0.0, spawn.seat, 1, "exited with code 1"))
    assert table.pool.fault is not None
    assert table.reply().reason == "pool_failed"
    table.create(2)
    assert table.reply().reason == "pool_failed"


def test_state_seconds_sum_to_elapsed_time_times_slots() -> None:
    table = Table(workers=2, instances=2)
    table.at(1.0)
    running(table, 1)
    table.at(3.0)
    table.step(1, 0)
    table.at(4.0)
    table.work()
    table.at(6.0)
    table.step(1, 1)
    table.at(16.0)
    seconds = table.clock.seconds()
    assert sum(seconds.values()) == pytest.approx(4 * 16.0)
    assert seconds["step"] == pytest.approx(11.0)
    assert table.clock.current()["respawn"] == 2
    assert all(table.metrics.value(name) == 1 for name in ("segue_env_step_seconds", "segue_env_reset_seconds"))
    assert table.metrics.sum("segue_env_step_seconds") == pytest.approx(1.0)


def test_the_memory_of_ended_episodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envpool.pool.REMEMBERED_EPISODES", 10)
    monkeypatch.setattr("envpool.instances.REMEMBERED_TASKS", 10)
    table = Table(instances=1)
    for episode in range(50):
        running(table, episode)
        table.close(episode)
        table.work()
    assert len(table.pool._ended) == 10 and len(table.pool._instances._first_seen) == 10
