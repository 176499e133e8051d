"""`segue eval` and `segue report`, on a config, on a finished run, on an unfinished one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_run import LONG, Command, segue, summary_of

from segue.config import load_config

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def finished(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    command = segue("train", smoke, "--run", run, "--serial", "--set", "checkpoint.every=1", "--set", "checkpoint.keep=1000")
    assert command.wait() == 0, command.tails()
    return run


def test_eval_of_a_config_is_that_of_its_starting_model(smoke: Path, finished: Path, tmp_path: Path) -> None:
    command = segue("eval", smoke, "--json", cwd=tmp_path)
    assert command.wait() == 0, command.tails()
    result, config = json.loads("\n".join(command.out)), load_config(smoke)
    assert result["n"] == config.eval.tasks and result["failed"] == 0
    assert (result["env"], result["temperature"]) == (config.task.env, config.eval.temperature)
    assert [run.name.partition("-2")[0] for run in (tmp_path / "runs").iterdir()] == [f"eval-{smoke.stem}"]
    assert result["success"] == summary_of(finished)["eval"]["before"]["success"], "greedy, on the same tasks and weights"


@pytest.mark.full
def test_eval_of_a_run_is_that_of_its_newest_checkpoint(finished: Path, tmp_path: Path) -> None:
    command = segue("eval", finished, cwd=tmp_path)
    assert command.wait() == 0, command.tails()
    assert command.err == []
    success = summary_of(finished)["eval"]["after"]["success"]
    assert command.line(r"^eval: success ([0-9.]+) on \d+ held-out tasks \(0 failed\)")[1] == f"{success:.3f}"


def test_eval_of_what_cannot_be_evaluated(smoke: Path, finished: Path, tmp_path: Path) -> None:
    for arguments, sentence in (
        ((finished, "--step", "99"), "has no complete checkpoint of step 99 (there is 1, 2, "),
        ((smoke, "--step", "1"), f"--step 1 needs a run directory, and {smoke} is none"),
        ((smoke, "--set", "eval.tasks=0"), "sets eval.tasks = 0, so there is nothing to evaluate"),
        ((tmp_path / "none",), f"{tmp_path / 'none'} is neither a run directory nor a config file: name one that exists"),
        ((tmp_path,), f"{tmp_path} is no run directory"),
    ):
        command = segue("eval", *arguments, cwd=tmp_path)
        assert command.wait() == 2
        assert sentence in command.sentence()


def test_report_of_a_finished_run(finished: Path) -> None:
    as_json = segue("report", finished, "--json")
    assert as_json.wait() == 0 and as_json.err == []
    assert json.loads("\n".join(as_json.out)) == summary_of(finished)
    table = segue("report", finished)
    assert table.wait() == 0 and table.err == []
    for word in ("success", "age", "prefill", "learner", "log-prob gap"):
        assert any(line.startswith(word) for line in table.out), word


def test_the_page_and_the_last_picture_of_a_finished_run(finished: Path) -> None:
    """Its lines tell all that the page can show, and a serial run's too."""
    page = segue("report", finished, "--html")
    assert (page.wait(), page.err, page.out) == (0, [], [f"{finished}/report.html"])
    text = (finished / "report.html").read_text()
    assert "It is done: " in text and "Idle share by role" in text and "Left out" not in text
    shown = segue("top", finished)
    assert (shown.wait(), shown.err) == (0, [])
    assert shown.out[0].startswith("Run run  It is done: ") and shown.line(r"^rollout +[█▒░]+ +\d+%  ")


def test_report_of_a_run_that_goes_on(smoke: Path, tmp_path: Path) -> None:
    with Command("train", smoke, "--run", tmp_path / "run", *LONG, "--serial") as command:
        command.steps(2)
        told = segue("report", tmp_path / "run")
        assert told.wait() == 0
        assert " goes on: " in told.sentence()
