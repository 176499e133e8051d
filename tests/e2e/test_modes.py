"""`mode = "sync"` and `"one_step_off"`: the same loop with less room; and two learner ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e_run import END_SECONDS, Command, assert_whole, kill, lines_of, segue, summary_of

from segue.config import load_config

pytestmark = pytest.mark.processes
FEWER = ("--set", "steps=5", "--set", "eval.tasks=0", "--set", "rollout.nodes=1")


def trained(smoke: Path, run: Path, *flags: str) -> dict[str, Any]:
    """The summary of a finished run."""
    command = segue("train", smoke, "--run", run, *FEWER, *flags)
    assert command.wait() == 0, command.tails()
    assert command.err == []
    assert_whole(run, 5)
    return summary_of(run)


def versions_of_trajectories(run: Path) -> list[set[int]]:
    """The weight versions under which each kept trajectory was sampled."""
    found = []
    for path in (run / "trajectories").glob("*.json"):
        turns = [segment for segment in json.loads(path.read_text())["segments"] if "versions" in segment]
        found.append({version for turn in turns for version in _as_list(turn["versions"])})
    assert found
    return found


def _as_list(versions: int | list[int]) -> list[int]:
    return versions if isinstance(versions, list) else [versions]


def assert_synchronous(run: Path, summary: dict[str, Any]) -> None:
    assert summary["mode"] == "sync" and summary["staleness"]["bound"] == 0
    assert summary["staleness"]["max"] == 0 and summary["staleness"]["multi_version_ratio"] == 0.0
    assert all(len(versions) == 1 for versions in versions_of_trajectories(run))
    assert all(len(line["ages"]) == 1 and line["tokens_masked_age"] == 0 for line in lines_of(run))
    config = load_config(run / "config.toml")
    assert summary["episodes"]["admitted"] == 5 * config.batch.groups * config.group.size, "nothing is begun for later"


def assert_one_step_off(run: Path, summary: dict[str, Any]) -> None:
    assert summary["mode"] == "one_step_off" and summary["staleness"]["bound"] == 1
    assert summary["staleness"]["max"] == 1
    assert load_config(run / "config.toml").update.inflight == "episode"
    assert summary["staleness"]["multi_version_ratio"] == 0.0, "whole episodes finish before new weights come"


@pytest.mark.full
def test_sync_on_ray(smoke: Path, tmp_path: Path) -> None:
    assert_synchronous(tmp_path / "run", trained(smoke, tmp_path / "run", "--set", "mode=sync"))


@pytest.mark.full
def test_one_step_off_is_one_step_off_serially(smoke: Path, tmp_path: Path) -> None:
    assert_one_step_off(tmp_path / "run", trained(smoke, tmp_path / "run", "--set", "mode=one_step_off", "--serial"))


def test_sync_trains_nothing_of_older_weights(smoke: Path, tmp_path: Path) -> None:
    assert_synchronous(tmp_path / "run", trained(smoke, tmp_path / "run", "--set", "mode=sync", "--serial"))


@pytest.mark.full
def test_one_step_off(smoke: Path, tmp_path: Path) -> None:
    assert_one_step_off(tmp_path / "run", trained(smoke, tmp_path / "run", "--set", "mode=one_step_off"))


@pytest.mark.full
@pytest.mark.parametrize("inflight", ["keep", "turn", "episode"])
def test_every_way_across_an_update(smoke: Path, tmp_path: Path, inflight: str) -> None:
    flags = (f"update.inflight={inflight}", "update.rolling=0.5", "rollout.nodes=2")
    summary = trained(smoke, tmp_path / "run", *(word for flag in flags for word in ("--set", flag)))
    assert summary["logprob_gap"]["max"] < 1e-3


def test_two_learner_ranks(smoke: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(smoke, run, "--set", "learner.ranks=2", "--set", "weightsync.bucket_bytes=16384")
    assert "learner-1 sends its share of step 5" in (run / "logs" / "learner-1.log").read_text()
    again = segue("train", smoke, "--run", run, *FEWER, "--set", "steps=6", "--resume", "--serial")
    assert again.wait() == 0, again.tails()
    assert_whole(run, 6)


@pytest.mark.full
def test_death_of_the_second_rank_is_named(smoke: Path, tmp_path: Path) -> None:
    flags = ("--set", "steps=100000", "--set", "eval.tasks=0", "--set", "learner.ranks=2", "--set", "rollout.nodes=1")
    with Command("train", smoke, "--run", tmp_path / "run", *flags) as command:
        command.steps(2)
        kill(command.role_pid("learner-1"))
        assert command.wait(END_SECONDS) == 1, command.tails()
        assert command.sentence().startswith("learner-1 died"), command.tails()
        command.assert_nothing_left()
