"""Following a run from outside: its console lines, against their real writer, and a run that does not start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.watched import scratch, steps_done, train
from segue.errors import RunFailed
from segue.report import step_line, step_text
from segue.rundir import RunDir


@pytest.mark.parametrize("step", [0, 8, 9, 99])
def test_a_step_is_recognised_on_the_console_as_the_run_prints_it(step: int) -> None:
    bill = {"tokens": 0, "seconds": 0.0, "updates": 0, "coalesced": 0, "inflight": "recompute"}
    line = step_line(
        step,
        elapsed_seconds=1,
        step_seconds=1,
        wait_seconds=0,
        version=1,
        queue_groups=0,
        in_flight=0,
        ages=[5],
        reprefill=bill,
        stats={},
    )
    assert steps_done(step_text(line, 100)) == step + 1


@pytest.mark.parametrize("line", ["eval before training: success 0.1", "  steps     3/4", "a step 3/4 was made", ""])
def test_no_other_line_is(line: str) -> None:
    assert steps_done(line) == 0


def test_a_folder_for_runs_stays_only_where_one_failed(tmp_path: Path) -> None:
    with scratch("it") as folder:
        (folder / "log").touch()
    assert not folder.exists()
    with pytest.raises(KeyboardInterrupt), scratch("it") as folder:
        raise KeyboardInterrupt
    assert not folder.exists()
    with pytest.raises(RunFailed), scratch("it") as folder:
        raise RunFailed("train", f"its logs in {folder}")
    assert folder.is_dir()
    folder.rmdir()
    with scratch("it", tmp_path) as folder:
        pass
    assert folder == tmp_path and tmp_path.is_dir()


@pytest.mark.processes
def test_a_run_that_cannot_start_is_told_with_its_own_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"There is no config file .*none\.toml(.|\n)*exit code 2"):
        train(tmp_path / "none.toml", tmp_path / "run", [], {1}, deadline=60.0)


RUN_THAT_GOES_ON = """#!/bin/sh
trap 'exit 143' TERM
for step in 1 2 3; do echo "step  $step/9  seconds"; done
sleep 60 &
wait
"""
"""Ends by SIGTERM alone, as a run does that writes what it has first."""


@pytest.mark.parametrize("until", [2, None])
def test_a_run_that_need_not_end_is_stopped_in_order(until: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(RUN_THAT_GOES_ON)
    python.chmod(0o755)
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text("")
    run.metrics.write_text('{"step": 0}\n')
    monkeypatch.setattr(sys, "executable", str(python))
    if until is None:
        with pytest.raises(RunFailed, match="took longer than 1 s and was stopped"):
            train(tmp_path / "a.toml", run.path, [], (), deadline=1.0)
    else:
        watched = train(tmp_path / "a.toml", run.path, [], (), deadline=30.0, until=until)
        assert (watched.lines, watched.summary) == ([{"step": 0}], {})
