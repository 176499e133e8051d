"""Ctrl-C: a clean stop with a checkpoint and exit code 130, at any moment; a second one ends at once. Then the run goes on.

So is SIGTERM (143), also where a batch system sends it to every process of the run at once.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_run import END_SECONDS, LONG, START_SECONDS, Command, assert_whole, lines_of, segue, summary_of

from segue.rundir import RunDir

pytestmark = pytest.mark.processes
STOPPING = r"^Stopping: the learner finishes its step and writes a checkpoint"


@pytest.fixture(scope="module")
def interrupted(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """A run with a step every checkpoint would miss, all of whose processes get SIGTERM after its third step or a little later,
    as `scancel` does it; top.txt beside it is what `segue top` showed of it before."""
    run = tmp_path_factory.mktemp("interrupted") / "run"
    with Command("train", smoke, "--run", run, *LONG, "--set", "checkpoint.every=1000", "--set", "eval.tasks=4") as command:
        command.steps(3)
        told = segue("top", run, "--once", "--interval", "0.2")
        assert (told.wait(), told.err) == (0, []), told.tails()
        (run.parent / "top.txt").write_text("\n".join(told.out))
        command.signal_all(signal.SIGTERM)
        command.wait(END_SECONDS)
        command.assert_nothing_left()
        yield command


def test_top_showed_it_live(interrupted: Command) -> None:
    shown = (interrupted.run.parent / "top.txt").read_text()
    assert re.match(r"Run run  It goes on: \d+ of 100000 steps are trained\.", shown)
    for role in ("scheduler-0", "rollout-0", "envpool-0", "learner-0", "weightsync-rollout-0", "weightsync-learner-0"):
        assert re.search(rf"^{role} +[█▒░]+ +\d+%  ", shown, re.M), shown
    for subject in ("queues", "in flight", "staleness", "versions", "env steps", "tokens/s", "alerts"):
        assert re.search(rf"^{subject} ", shown, re.M), shown
    assert "does not answer" not in shown and "no sign of life" not in shown


def test_sigterm_to_every_process_stops_in_order_and_keeps_a_checkpoint(interrupted: Command) -> None:
    assert interrupted.wait() == 128 + signal.SIGTERM, interrupted.tails()
    assert_stopped_in_order(interrupted)


@pytest.mark.full
def test_ctrl_c_stops_in_order_and_keeps_a_checkpoint(smoke: Path, tmp_path: Path) -> None:
    with Command("train", smoke, "--run", tmp_path / "run", *LONG, "--set", "checkpoint.every=1000") as command:
        command.steps(3)
        command.signal(signal.SIGINT)
        assert command.wait(END_SECONDS) == 130, command.tails()
        command.assert_nothing_left()
        assert_stopped_in_order(command)


def assert_stopped_in_order(interrupted: Command) -> None:
    run = interrupted.run
    assert interrupted.err == []
    assert any(re.match(STOPPING, line) for line in interrupted.out)
    assert not (run / "summary.json").exists()
    assert not list((run / "metrics" / "targets").iterdir()), "a clean stop withdraws all targets"
    steps = [line["step"] for line in lines_of(run)]
    saved = RunDir.open(run).latest_checkpoint().step
    assert steps == list(range(saved)) and saved >= 3, "every step of the checkpoint has its line"
    assert interrupted.trained() == saved, "and was shown"
    told, go_on = interrupted.out[-2:]
    assert told == f"Stopped at step {saved} of 100000; the newest checkpoint is {run}/checkpoints/step_{saved}. Go on with:"
    assert go_on.startswith(f"  segue train {interrupted.arguments[1]} --run {run} --resume --set steps=100000 --set ")
    assert any(line.startswith("tokens ") for line in interrupted.out), "the figures so far"


def test_a_stopped_run_can_be_reported(interrupted: Command) -> None:
    told = segue("report", interrupted.run, "--json")
    assert told.wait() == 0
    assert json.loads("\n".join(told.out))["incomplete"] is True
    assert "is not complete" in told.sentence() and "--resume" in told.sentence()


def test_the_stopped_run_goes_on(interrupted: Command, smoke: Path) -> None:
    """On Ray again: at the right step, under new version ids, with every step once; the first evaluation is not repeated."""
    run = interrupted.run
    saved = RunDir.open(run).latest_checkpoint().step
    before = lines_of(run)
    first_eval = json.loads((run / "evals.json").read_text())["before"]
    flags = (*LONG, "--set", f"steps={saved + 3}", "--set", "eval.tasks=4", "--resume")
    with Command("train", smoke, "--run", run, *flags) as command:
        assert command.wait() == 0, command.tails()
        command.assert_nothing_left()
    assert any(f"from {run}/checkpoints/step_{saved}" in line for line in command.out)
    assert not [line for line in command.out if line.startswith("eval before")]
    assert int(command.line(r"^step +(\d+)/")[1]) == saved + 1
    assert_whole(run, saved + 3)
    after = lines_of(run)
    assert after[:saved] == before
    assert all(line["version"] > before[-1]["version"] for line in after[saved:])
    assert after[saved]["elapsed_seconds"] > before[-1]["elapsed_seconds"]
    assert summary_of(run)["eval"]["before"] == first_eval
    assert [attempt["resumed_from"] for attempt in attempts(run)] == [None, saved]
    for name in ("driver-0", "scheduler-0", "rollout-0", "envpool-0", "learner-0"):
        logs = sorted(path.name for path in (run / "logs").glob(f"{name}*"))
        assert logs == [f"{name}.2.log", f"{name}.log"], "one of each attempt"


def attempts(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_a_second_ctrl_c_ends_at_once(smoke: Path, tmp_path: Path) -> None:
    """The first one waits for a learner that cannot stop, because it is stopped already."""
    with Command("train", smoke, "--run", tmp_path / "run", *LONG) as command:
        command.steps(1)
        learner = command.role_pid("learner-0")
        os.kill(learner, signal.SIGSTOP)
        command.signal(signal.SIGINT)
        command.line(STOPPING, END_SECONDS)
        command.signal(signal.SIGINT)
        assert command.wait(END_SECONDS) == 130, command.tails()
        assert command.err == []
        command.assert_nothing_left()


def test_ctrl_c_before_anything_runs(smoke: Path, tmp_path: Path) -> None:
    with Command("train", smoke, "--run", tmp_path / "run", *LONG) as command:
        command.line(r"^  weights")
        command.signal(signal.SIGINT)
        assert command.wait(END_SECONDS) == 130, command.tails()
        assert all(line == "Interrupted." for line in command.err)
        command.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_end_during_the_warm_start(smoke: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The process that makes it ends too; and as nothing was begun, the name of the run is free again."""
    if "[warmstart]" not in smoke.read_text():
        pytest.skip("the config has a model")
    run = tmp_path / "run"
    with Command("train", smoke, "--run", run, *LONG, env={"SEGUE_CACHE": str(tmp_path)}) as command:
        command.pid_of("warmstart", within=START_SECONDS)
        command.signal(number)
        assert command.wait(END_SECONDS) == (130 if number == signal.SIGINT else -number), command.tails()
        command.assert_nothing_left(within=10.0)
    assert run.exists() == (number != signal.SIGINT)


def test_ctrl_c_while_the_roles_start(smoke: Path, tmp_path: Path) -> None:
    with Command("train", smoke, "--run", tmp_path / "run", *LONG) as command:
        command.pid_of("ray::RoleActor", within=START_SECONDS)
        command.signal(signal.SIGINT)
        assert command.wait(END_SECONDS) == 130, command.tails()
        assert command.err == []
        assert command.out[-1] == (
            f"Stopped before a step was trained: there is no checkpoint, and {tmp_path}/run may be used again."
        )
        command.assert_nothing_left()


@pytest.mark.full
def test_ctrl_c_during_an_evaluation(smoke: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Command("train", smoke, "--run", run, *LONG, "--set", "eval.tasks=2000") as command:
        command.line(r"^evaluating")
        command.signal(signal.SIGINT)
        assert command.wait(END_SECONDS) == 130, command.tails()
        assert command.err == []
        command.assert_nothing_left()
    assert not list((run / "metrics" / "targets").iterdir())


def test_sigterm_to_every_process_in_serial_mode(smoke: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Command("train", smoke, "--run", run, *LONG, "--set", "checkpoint.every=1000", "--serial") as command:
        command.steps(2)
        command.signal_all(signal.SIGTERM)
        assert command.wait(END_SECONDS) == 128 + signal.SIGTERM, command.tails()
        assert command.err == []
        command.assert_nothing_left()
    saved = RunDir.open(run).latest_checkpoint().step
    assert saved >= 2 and len(lines_of(run)) == command.trained() == saved
