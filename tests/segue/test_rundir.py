"""The run directory: not reused in silence, never half a file, one sentence when the disk is full."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue import rundir
from segue.errors import UserError
from segue.files import JsonLines, disk_errors, read_jsonl, write_json
from segue.rundir import RunDir

NOON = datetime(2026, 3, 1, 12, 0, 5)


def test_a_new_run_directory_has_everything_of_the_plan(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "deep" / "demo", 'mode = "async"\n')
    assert run.config.read_text() == 'mode = "async"\n'
    for folder in (run.targets, run.journal, run.queue, run.checkpoints, run.logs, run.trajectories):
        assert folder.is_dir()
    assert run.name == "demo"
    assert RunDir.open(tmp_path / "deep" / "demo").config == run.config


def checkpoint(run: RunDir, step: int) -> None:
    (run.checkpoints / f"step_{step}").mkdir()
    (run.checkpoints / f"step_{step}" / "COMPLETE").touch()


def test_an_empty_directory_may_be_used_and_a_used_one_names_the_ways_out(tmp_path: Path) -> None:
    path = tmp_path / "demo"
    path.mkdir()
    run = RunDir.create(path, "")
    with JsonLines(run.metrics) as lines:
        lines.append({"step": 0})
    run.unlock()
    with pytest.raises(UserError) as refused:
        RunDir.create(path, "")
    assert str(refused.value) == (
        f"The run directory {path} is already used, by a run that has no checkpoint to go on from: "
        "give this one another name with --run."
    )
    checkpoint(run, 1)
    with pytest.raises(UserError) as refused:
        RunDir.create(path, "")
    assert str(refused.value) == (
        f"The run directory {path} is already used: add --resume to go on with that run, "
        "or give this one another name with --run."
    )


def test_a_name_whose_run_trained_no_step_is_free(tmp_path: Path) -> None:
    """A start that failed, or was stopped, takes no name; what it left is not taken for the next run's."""
    run = RunDir.create(tmp_path / "demo", "steps = 1\n")
    run.begin_attempt(NOON)
    for path in (run.log_of("driver-0"), run.evals, run.path / "notes.txt"):
        path.write_text("{}")
    (run.checkpoints / "step_1").mkdir()  # not complete
    run.metrics.touch()
    with pytest.raises(UserError, match="is still going on"):
        RunDir.create(run.path, "steps = 2\n")
    assert run.log_of("driver-0").exists()
    run.unlock()
    with pytest.raises(UserError, match="has no complete checkpoint to resume from: start it again without --resume"):
        run.latest_checkpoint()
    again = RunDir.create(run.path, "steps = 2\n")
    assert again.config.read_text() == "steps = 2\n" and again.attempts() == 0
    assert not again.evals.exists() and not list(again.logs.iterdir()) and not list(again.checkpoints.iterdir())
    assert (run.path / "notes.txt").exists(), "not ours"
    again.discard()
    assert [path.name for path in run.path.iterdir()] == ["notes.txt"]


def test_what_is_no_run_directory_is_not_called_one_that_is_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file is a file: name a new or an empty folder with --run\."):
        RunDir.create(tmp_path / "file", "")
    for folder in ("logs", "queue"):
        (tmp_path / folder).mkdir()
    (tmp_path / "config.toml").touch()  # of a program of the user's own
    (tmp_path / "logs" / "precious").touch()
    with pytest.raises(UserError, match=r"is not empty and no run directory: name a new or an empty folder with --run\."):
        RunDir.create(tmp_path, "")
    assert (tmp_path / "logs" / "precious").exists()


def test_the_default_name_is_the_configs_and_the_time_and_never_collides(tmp_path: Path) -> None:
    config = Path("configs/quickstart.toml")
    names = [RunDir.create_default(config, "", NOON, tmp_path).name for _ in range(3)]
    assert names == ["quickstart-20260301-120005", "quickstart-20260301-120005-2", "quickstart-20260301-120005-3"]


def test_a_place_where_nothing_can_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be made \(Not a directory\): name another with --run\."):
        RunDir.create(tmp_path / "file" / "demo", "")


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no run directory .*: name one"):
        RunDir.open(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"is no run directory \(it holds no config.toml\)"):
        RunDir.open(tmp_path)


def test_every_process_has_a_log_of_its_own_in_every_attempt_and_start(tmp_path: Path) -> None:
    names = [RunDir(tmp_path).log_of("rollout-0", attempt, start).name for attempt in (1, 2) for start in (1, 2)]
    assert names == ["rollout-0.log", "rollout-0.1-2.log", "rollout-0.2.log", "rollout-0.2-2.log"]


def test_resuming_keeps_config_and_summary_of_the_last_attempt(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "demo", "steps = 1\n")
    assert run.begin_attempt(NOON) == 1
    run.unlock()
    RunDir.resume(run.path, "steps = 1\n").unlock()
    assert not list(run.path.glob("config.attempt-*"))
    write_json(run.summary, {"steps": 1})
    RunDir.resume(run.path, "steps = 2\n").unlock()
    assert not run.summary.exists() and (run.path / "summary.attempt-1.json").exists()
    assert run.config.read_text() == "steps = 2\n"
    assert (run.path / "config.attempt-1.toml").read_text() == "steps = 1\n"
    assert run.begin_attempt(NOON, resumed_from=7) == 2
    lines = read_jsonl(run.path / "attempts.jsonl")
    assert [(line["attempt"], line["resumed_from"]) for line in lines] == [(1, None), (2, 7)]


@pytest.mark.parametrize("text", [b"[task\n", b"\xab\xff"], ids=["half a line", "no text"])
def test_a_damaged_config_is_one_sentence_and_nothing_is_gone_on_with(text: bytes, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "steps = 1\n")
    run.unlock()
    run.config.write_bytes(text)
    with pytest.raises(UserError, match=r"config\.toml is damaged \(.*\): put the run's config back there"):
        RunDir.resume(run.path, "steps = 2\n")
    assert run.config.read_bytes() == text


def test_a_run_directory_that_cannot_be_locked_is_one_sentence(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "steps = 1\n")
    run.unlock()
    (run.path / ".lock").unlink()
    (run.path / ".lock").mkdir()
    with pytest.raises(UserError, match=r"\.lock cannot be written \(Is a directory\): make .* writable"):
        RunDir.resume(run.path, "steps = 1\n")


@pytest.mark.parametrize("folders", [5, None, "x"])
def test_a_suite_path_that_is_none_is_passed_over(folders: object, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "steps = 1\n")
    (run.path / "attempts.jsonl").write_text(json.dumps({"attempt": 1, "suite_path": folders}) + "\n")
    assert run.suite_path() == []


def test_only_one_process_owns_a_run(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "demo", "")
    run.lock()  # once more is nothing: it was taken at creation
    code = (
        "import sys; from pathlib import Path; from segue.rundir import RunDir; from segue.errors import UserError\n"
        "try: RunDir(Path(sys.argv[1])).lock()\n"
        "except UserError as error: print(error)\n"
        "else: print('locked')"
    )

    def other() -> str:
        command = [sys.executable, "-c", code, str(run.path)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    assert other() == f"The run in {run.path} is still going on (process {os.getpid()}): stop it first."
    run.unlock()
    assert other() == "locked"
    run.lock()  # the other process ended, and with it its lock
    run.unlock()


def test_whether_somebody_owns_a_run_can_be_seen(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "demo", "")
    assert RunDir.open(run.path).held()
    run.unlock()
    assert not RunDir.open(run.path).held()
    run.lock()  # looking left nothing behind
    (run.path / ".lock").unlink()
    assert not RunDir.open(run.path).held(), "not of ours, or copied without it"


def test_a_run_that_goes_on_is_not_resumed_and_not_touched(tmp_path: Path) -> None:
    first = RunDir.create(tmp_path / "demo", "steps = 1\n")
    with pytest.raises(UserError, match="is still going on"):
        RunDir.resume(first.path, "steps = 2\n")
    assert first.config.read_text() == "steps = 1\n"
    first.unlock()
    second = RunDir.resume(first.path, "steps = 2\n")
    assert second.config.read_text() == "steps = 2\n"
    second.unlock()


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "demo", "")
    with pytest.raises(UserError, match="has no complete checkpoint to resume from: start it again without --resume"):
        run.latest_checkpoint()
    with JsonLines(run.metrics) as lines:
        lines.append({"step": 0})
    with pytest.raises(UserError, match="has no complete checkpoint to resume from: start the run anew in another directory"):
        run.latest_checkpoint()
    for name, complete in (("step_2", True), ("step_10", True), ("step_20", False), (".step_30.writing", True), ("step_x", True)):
        (run.checkpoints / name).mkdir()
        if complete:
            (run.checkpoints / name / "COMPLETE").write_text("{}")
    newest = run.latest_checkpoint()
    assert (newest.step, newest.path) == (10, run.checkpoints / "step_10")
    assert [folder.step for folder in run.complete_checkpoints()] == [2, 10]


@settings(max_examples=40)
@given(step=st.integers(0, 12), steps=st.integers(0, 10))
def test_a_resume_at_step_s_keeps_the_steps_below_s(tmp_path_factory: pytest.TempPathFactory, step: int, steps: int) -> None:
    run = RunDir.create(tmp_path_factory.mktemp("run") / "demo", "")
    with JsonLines(run.metrics) as lines:
        for number in range(steps):
            lines.append({"step": number, "reward": number / 4})
    with open(run.metrics, "ab") as file:
        file.write(b'{"step": 99, "rew')
    assert run.truncate_metrics(step) == max(0, steps - step)
    assert read_jsonl(run.metrics) == [{"step": n, "reward": n / 4} for n in range(min(step, steps))]


def test_truncating_metrics_that_do_not_exist_is_nothing(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "demo", "")
    assert run.truncate_metrics(3) == 0
    for damaged, sentence in (
        ("{}\n", "has a line without a step"),
        ("[]\n", "Line 1 .* is no JSON object"),
        ("{\n", "no JSON object"),
    ):
        run.metrics.write_text(damaged)
        with pytest.raises(UserError, match=sentence):
            run.truncate_metrics(3)


def test_a_full_disk_at_the_start_is_the_users_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(path: Path, data: bytes) -> None:
        with disk_errors(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rundir, "write_atomic", no_space)
    with pytest.raises(UserError, match=r"because the disk is full: free some space there\.$"):
        RunDir.create(tmp_path / "demo", "")


def test_targets_of_a_crashed_attempt_are_cleared(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "demo", "")
    write_json(run.targets / "learner-0.json", [])
    run.clear_targets()
    assert not list(run.targets.iterdir())
