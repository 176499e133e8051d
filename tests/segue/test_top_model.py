"""What `segue top` shows of two looks at a run, and of one that is over."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from exported_run import ENV, Exported, line_of, write_run
from rich.console import Console

from segue.files import read_jsonl
from segue.report.read import read_report
from segue.top import model
from segue.top.draw import draw
from segue.top.model import EACH, IDLEST, Ages, Look, Picture, Process, Queue, past

WALL = 5000.0


def looks(exported: Exported, seconds: float, **after: Any) -> tuple[Look, Look]:
    """One before and one after so many seconds of work."""
    before = Look(exported.time, WALL, exported.scrape())
    exported.work(seconds)
    return before, Look(exported.time, WALL, exported.scrape(), **after)


def live(before: Look | None, now: Look) -> Picture:
    return model.live(before, now, 4)


def process(picture: Picture, name: str) -> Process:
    return next(process for process in picture.processes if process.name == name)


def test_shares_of_states_are_those_of_the_time_between_the_looks() -> None:
    exported = Exported()
    exported.time += 1000.0  # all of it waiting
    before, after = looks(exported, 8.0)
    picture = live(before, after)
    assert picture.span == 8.0
    assert process(picture, "rollout-1").shares == {"generate": 0.75, "wait_env": 0.25}
    assert process(picture, "rollout-1").busy == 0.75
    assert process(picture, "learner-0").shares == {"wait_batch": 0.5, "compute": 0.5}
    assert process(picture, "envpool-0").shares == {"wait_action": 1.0} and process(picture, "envpool-0").busy == 0.0
    assert [p.name for p in picture.processes] == ["scheduler-0", "rollout-0", "rollout-1", "envpool-0", "learner-0"]
    assert process(live(None, after), "learner-0").shares["wait_batch"] > 0.9, "one look alone: since the processes began"


def test_a_state_is_the_one_a_process_is_in_and_of_slots_the_commonest() -> None:
    exported = Exported()
    exported.learning.enter("checkpoint")
    for slot in range(3):
        exported.slots.move(slot, "step")
    picture = live(None, Look(1.0, WALL, exported.scrape()))
    assert process(picture, "learner-0").now == "checkpoint"
    assert process(picture, "envpool-0").now == "step 3/4"


def test_rates_are_per_second_between_the_looks_and_trained_ones_of_the_last_step() -> None:
    exported = Exported()
    exported.work(50.0)
    before, after = looks(exported, 4.0, line=line_of(6))
    assert live(before, after).per_second == {"sampled": 200.0, "prefilled": 80.0, "trained in the last step": 150.0}
    assert "sampled" not in live(None, after).per_second, "nobody knows over which time"


def test_a_node_that_came_between_the_looks_does_not_bring_its_whole_past() -> None:
    exported = Exported()
    exported.work(500.0)
    before, after = looks(exported, 4.0)
    known = Look(before.moment, WALL, {target: own for target, own in before.samples.items() if target != "rollout-1"})
    picture = live(known, after)
    assert picture.per_second["sampled"] == 100.0
    assert process(picture, "rollout-1").shares == {} and process(picture, "rollout-1").busy is None


def test_versions_say_who_is_behind() -> None:
    exported = Exported()
    exported.learner.set("segue_policy_version", 7)
    for node, version in zip(exported.nodes, (7, 5), strict=True):
        node.set("segue_policy_version", version)
    picture = live(None, Look(1.0, WALL, exported.scrape()))
    assert picture.newest == 7
    assert [(p.version, p.behind) for p in picture.processes if p.name.startswith("rollout")] == [(7, 0), (5, 2)]


def words(picture: Picture) -> str:
    console = Console(file=io.StringIO(), width=300)
    with console.capture() as text:
        console.print(draw("Run x", "It goes on.", picture, None, 9, WALL))
    return text.get()


def test_before_the_first_weights_nobody_has_a_version() -> None:
    exported = Exported()
    exported.activities[0].begin("wait_weights")
    picture = live(None, Look(1.0, WALL, exported.scrape()))
    assert (picture.newest, process(picture, "rollout-0").version) == (None, None)
    text = words(picture)
    assert "no weights yet  in wait_weights" in text and re.search(r"^versions +none yet *$", text, re.M)
    exported.learner.set("segue_policy_update_timestamp_seconds", 4000.0)
    exported.nodes[1].set("segue_policy_update_timestamp_seconds", 4000.0)
    picture = live(None, Look(1.0, WALL, exported.scrape()))
    assert (picture.newest, process(picture, "rollout-1").version) == (0, 0), "the first version is 0"
    text = words(picture)
    assert "  version 0  " in text and re.search(r"^versions +newest 0: rollout-0 none yet *$", text, re.M)


def test_of_many_nodes_it_is_told_how_many_have_no_weights() -> None:
    exported = Exported(EACH + 1)
    exported.learner.set("segue_policy_version", 1)
    for node in exported.nodes[:EACH]:
        node.set("segue_policy_version", 1)
    text = words(live(None, Look(1.0, WALL, exported.scrape())))
    assert "1 without weights yet" in text and "all nodes have it" not in text


def test_a_state_without_shares_stands_alone() -> None:
    alone = Picture(span=None, processes=[Process("rollout-0", {}, now="wait_admission")], ages=Ages(None, None, None, None, 4))
    assert "in wait_admission" in words(alone) and "wait_admission;" not in words(alone)


def test_queues_in_flight_and_ages() -> None:
    exported = Exported()
    for queue, depth in (("pending", 12), ("ready", 3), ("batches", 1)):
        exported.scheduler.set("segue_queue_depth", depth, queue=queue)
    exported.scheduler.set("segue_queue_capacity", 40, queue="ready")
    exported.scheduler.set("segue_episodes_in_flight", 96, env=ENV)
    for node in exported.nodes:
        node.set("segue_queue_depth", 2, queue="engine")
        node.set("segue_requests_running", 16)
    picture = live(None, Look(1.0, WALL, exported.scrape(), line=line_of(3), ages=[50, 30, 0, 20]))
    assert {Queue("pending", 12), Queue("ready", 3, 40), Queue("rollout engine", 4), Queue("envpool requests", 0)} <= {
        *picture.queues
    }
    assert (picture.in_flight, picture.requests) == (96, 32)
    assert picture.ages == Ages(last_mean=250 / 300, last_max=2, mean=0.9, max=3, bound=4)


def test_latency_is_of_the_window_or_else_of_the_whole_run() -> None:
    exported = Exported()
    exported.pool.observe("segue_env_step_seconds", 400.0, env=ENV)
    before, after = looks(exported, 2.0)
    found = live(before, after).latency
    assert found is not None and found.over == "in that time" and 0.1 < found.p50 < found.p95 <= 0.25
    quiet = live(after, Look(after.moment + 2.0, WALL, exported.scrape())).latency
    assert quiet is not None and quiet.over == "whole run" and quiet.p95 > 300.0
    assert live(None, Look(1.0, WALL, {"envpool-0": Exported().scrape()["envpool-0"]})).latency is None


def test_who_does_not_answer_and_who_is_stuck_is_told() -> None:
    exported = Exported()
    samples = exported.scrape()
    del samples["rollout-1"]
    picture = live(None, Look(1.0, WALL + 75.0, samples, {"rollout-1": "Connection refused"}))
    assert process(picture, "rollout-1") == Process("rollout-1", {}, trouble="does not answer: Connection refused")
    assert process(picture, "learner-0").trouble == "no sign of life for 75 s"
    assert process(live(None, Look(1.0, WALL + 5.0, samples)), "learner-0").trouble == ""


def test_of_many_nodes_the_sum_is_shown_with_the_idlest_and_the_unwell() -> None:
    exported = Exported(nodes=30)
    exported.activities[17].begin("wait_weights")  # it waits while the others generate
    before, after = looks(exported, 4.0, silent={"rollout-30": "no answer in time"})
    shown = [p for p in live(before, after).processes if p.name.startswith("rollout")]
    assert [p.name for p in shown[:2]] == ["rollout × 31", "rollout-17"]
    assert shown[0].count == 31 and shown[0].busy == pytest.approx(0.75 * 29 / 30)
    assert len(shown) == 1 + IDLEST + 1 and shown[-1].name == "rollout-30"
    few = Exported(nodes=EACH)
    assert [p.name for p in live(*looks(few, 4.0)).processes if "rollout" in p.name] == [f"rollout-{n}" for n in range(EACH)]


def test_a_run_that_is_done_shows_its_summary(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", trained=3, of=3, done=True)
    picture = past(read_jsonl(run.metrics), read_report(run.path)[0], 4)
    assert picture.span is None and picture.line is not None and picture.line["step"] == 2
    assert process(picture, "rollout").busy == pytest.approx(0.75) and process(picture, "learner").busy == pytest.approx(0.5)
    assert picture.success == {"before": 0.25, "after": 0.75}
    assert picture.ages == Ages(250 / 300, 2, 250 / 300, 2, 4)
    assert picture.per_second == {"sampled": 200.0, "trained": 150.0}


def test_a_run_that_ended_early_shows_its_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", trained=3, of=9)
    picture = past(read_jsonl(run.metrics), None, 4)
    assert process(picture, "rollout").shares == pytest.approx({"generate": 0.75, "wait_env": 0.25})
    assert picture.latency is not None and picture.latency.over == "last step"
    old = past(read_jsonl(write_run(tmp_path / "old", 3, 9, told=False).metrics), None, 4)
    assert (old.processes, old.latency) == ([], None) and old.per_second == {"trained": 150.0}
    assert past([], None, 4).line is None, "nothing was trained"
