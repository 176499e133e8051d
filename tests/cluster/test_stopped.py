"""What a run that was stopped says at its end: the step, the checkpoint, and a command that works."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from segue.cluster.stopped import as_it_can_be, go_on_command, stopped_text, tell_stopped
from segue.config import to_toml
from segue.config.root import resolve
from segue.files import JsonLines
from segue.rundir import RunDir

CONFIG = resolve({"steps": 8, "task": {"env": "latency"}, "model": {"path": "x"}}, "a test")


def test_how_far_it_is_and_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(tmp_path / "run", to_toml(CONFIG))
    assert stopped_text(run, CONFIG, "again") == (
        f"Stopped before a step was trained: there is no checkpoint, and {run.path} may be used again."
    )
    with JsonLines(run.metrics) as lines:
        for step in range(4):
            lines.append({"step": step, "ages": [2, 1], "tokens_trained": 3.0})
    assert stopped_text(run, CONFIG, "again") == (
        "Stopped at step 4 of 8, without a checkpoint: this run cannot go on, start it anew."
    )
    folder = run.checkpoints / "step_4"
    folder.mkdir()
    (folder / "COMPLETE").touch()
    tell_stopped(run, CONFIG, "again")
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == [f"Stopped at step 4 of 8; the newest checkpoint is {folder}. Go on with:", "  again"]
    assert any(line.startswith("tokens") and "12 trained" in line for line in out)


def test_the_command_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEGUE_COMMAND", raising=False)
    command = go_on_command(Path("my config.toml"), Path("runs/x"), ["steps=9", "task.args.facts=['a b']"], serial=True)
    words = shlex.split(command)
    assert words[:2] == ["segue", "train"] and words[2:7] == ["my config.toml", "--run", "runs/x", "--resume", "--serial"]
    assert words[7:] == ["--set", "steps=9", "--set", "task.args.facts=['a b']"]
    monkeypatch.setenv("SEGUE_COMMAND", "./launch.sh")
    assert go_on_command(Path("a"), Path("b"), [], serial=False) == "./launch.sh a --run b --resume"


def test_nobody_is_sent_to_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", to_toml(CONFIG))
    sentences = [
        "x could not be written because the disk is full: free some space there and go on with --resume.",
        "Training diverged: lower learner.lr and resume from the newest checkpoint.",
    ]
    assert [as_it_can_be(sentence, run) for sentence in sentences] == [
        "x could not be written because the disk is full: free some space there and start the run anew.",
        "Training diverged: lower learner.lr and start the run anew.",
    ]
    (run.checkpoints / "step_4").mkdir()
    (run.checkpoints / "step_4" / "COMPLETE").touch()
    assert [as_it_can_be(sentence, run) for sentence in sentences] == sentences
