"""`--serial`: the whole loop in one process on a logical clock, the same every time, and the same loop as on Ray."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_run import Command, assert_whole, lines_of, segue, summary_of

from segue.config import load_config
from segue.report.steps import without_seconds

pytestmark = pytest.mark.processes

MIXED = ("--set", "serial.learner_step_seconds=0.3", "--set", "serial.decode_seconds=0.05")
"""A learner fast enough against the engine that updates meet requests in flight."""


@pytest.fixture(scope="module")
def twins(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Two serial runs of one config, at the same time."""
    runs = [tmp_path_factory.mktemp("serial") / name for name in ("one", "two")]
    commands = [Command("train", smoke, "--run", run, "--serial", *MIXED) for run in runs]
    with commands[0], commands[1]:
        for command in commands:
            assert command.wait() == 0, command.tails()
            assert command.err == []
            command.assert_nothing_left()
        yield runs


def test_two_serial_runs_agree_in_all_but_seconds(twins: list[Path]) -> None:
    one, two = (lines_of(run) for run in twins)
    assert [without_seconds(line) for line in one] == [without_seconds(line) for line in two]
    first, second = (summary_of(run) for run in twins)
    for key in ("tokens", "staleness", "episodes", "prefill", "logprob_gap", "eval", "notes"):
        assert first[key] == second[key]
    kept = [sorted(path.name for path in (run / "trajectories").iterdir()) for run in twins]
    assert kept[0] == kept[1]


def test_a_serial_run_is_whole(twins: list[Path]) -> None:
    config = load_config(twins[0] / "config.toml")
    assert_whole(twins[0], config.steps)
    summary = summary_of(twins[0])
    assert summary["episodes"]["trained"] == config.steps * config.batch.groups * config.group.size
    assert 0.0 < summary["logprob_gap"]["probe_max"] < 1e-4
    assert set(summary["roles"]) == {"scheduler", "rollout", "envpool", "learner", "weightsync"}


def test_it_is_asynchronous_as_on_ray(twins: list[Path]) -> None:
    """Tokens are trained at greater ages than 0, under several versions, and requests are paused mid-turn and go on."""
    summary = summary_of(twins[0])
    assert summary["staleness"]["mean"] > 0.3 and summary["staleness"]["multi_version_ratio"] > 0.0
    assert summary["episodes"]["paused"] == summary["episodes"]["resumed"] > 0


def test_it_is_one_process(smoke: Path, tmp_path: Path) -> None:
    """And without --run, the run directory is named after the config and the time."""
    with Command("train", smoke, "--serial", cwd=tmp_path) as command:
        command.line(r"^eval before training")
        assert sorted(process.pid == command.pid for process in command.family()) == [False, True]
    (run,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(rf"{smoke.stem}-\d{{8}}-\d{{6}}", run.name)


def test_a_console_that_goes_away_does_not_end_the_run(smoke: Path, tmp_path: Path) -> None:
    with Command("train", smoke, "--run", tmp_path / "run", "--serial", "--set", "eval.tasks=0", "--set", "steps=4") as command:
        command.steps(1)
        command.close_console()
        assert command.wait() == 0, command.tails()
        assert command.err == []
    assert_whole(tmp_path / "run", 4)
    assert "the console is gone" in (tmp_path / "run" / "logs" / "serial-0.log").read_text()


def test_what_serial_mode_cannot_do_is_said(smoke: Path, tmp_path: Path) -> None:
    command = segue("train", smoke, "--run", tmp_path / "run", "--serial", "--set", "learner.ranks=2")
    sentence = "--serial runs one learner rank, and learner.ranks = 2: add --set learner.ranks=1."
    assert (command.wait(), command.sentence()) == (2, sentence)
    assert not (tmp_path / "run").exists()
