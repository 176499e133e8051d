"""A newcomer's first suite: what is wrong in it is said in one sentence, with the exception and its line; exit code 2."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomli_w
from e2e_run import segue

from segue.config import load_config

pytestmark = pytest.mark.processes

SUITE = """
from segue.episode import Task
from segue.ports.envpool import ChatMessage, Observation, StepResult


class Bugs:
    resume = "replay"

    def reset(self, task, seed):
        self.task = task
        return Observation([ChatMessage("user", "1")])

    def step(self, action):
        if BROKEN(self.task):
            raise KeyError("oops")
        return StepResult(Observation([]), 1.0, True, False)

    def close(self):
        pass


class Suite:
    name = "bugs"

    def tasks(self, split, n, seed):
        return [Task(f"{split}-{i}", "bugs", i) for i in range(n)]

    def make(self, task, member, attempt=1):
        return Bugs()


def suite(args):
    return Suite()
"""
LINE = SUITE.splitlines().index('            raise KeyError("oops")') + 1


@pytest.fixture(scope="module")
def model(smoke: Path) -> Path:
    return Path(segue("warmstart", smoke).out[-1])


def config_of(folder: Path, smoke: Path, model: Path | None, module: str = "bugs") -> Path:
    """The smoke config, in `folder`, with `module:suite` and, if given, a model of one's own."""
    data = load_config(smoke).model_dump(exclude_none=True)
    data["task"] = {"env": f"{module}:suite", "train_tasks": 40}
    if model is not None:
        data.pop("warmstart")
        data["model"] = {"path": str(model)}
    path = folder / "my.toml"
    path.write_text(tomli_w.dumps(data))
    return path


FEW = ("--set", "eval.tasks=4", "--set", "scheduler.retries_env=0", "--serial")


def write(folder: Path, broken: str) -> None:
    (folder / "bugs.py").write_text(SUITE.replace("BROKEN(self.task)", broken))


def test_an_evaluation_of_which_nothing_is_left_ends_the_run(smoke: Path, model: Path, tmp_path: Path) -> None:
    """Beside the config file the module is found, whatever the working directory."""
    write(tmp_path, "True")
    run = tmp_path / "run"
    command = segue("train", config_of(tmp_path, smoke, model), "--run", run, *FEW)
    assert command.wait() == 2, command.tails()
    assert command.sentence() == (
        f"All 4 episodes of the evaluation (before) failed on every attempt, the last with KeyError: 'oops' in bugs.py:{LINE} "
        f"(env: env_error): {run}/logs/serial-0.log has the traceback; mend the environment or its data."
    )
    log = (run / "logs" / "serial-0.log").read_text()
    assert log.count("Traceback (most recent call last)") - log.count("UserError: All 4") == 1, "once per distinct error"
    assert f'bugs.py", line {LINE}, in step' in log


@pytest.mark.full
def test_some_failures_of_an_evaluation_are_a_warning_and_many_of_training_end_the_run(
    smoke: Path, model: Path, tmp_path: Path
) -> None:
    write(tmp_path, "not self.task.id.startswith('eval') or self.task.id == 'eval-1'")
    run = tmp_path / "run"
    command = segue("train", config_of(tmp_path, smoke, model), "--run", run, *FEW)
    assert command.wait() == 2, command.tails()
    what = rf"KeyError: 'oops' in bugs\.py:{LINE} \(env: env_error\)"
    command.line(rf"^warning: 1 of 4 episodes of the evaluation \(before\) failed on every attempt, the last with {what}\.$")
    assert re.fullmatch(
        rf"17 tasks failed on every attempt \(.*, …\), the last with {what}: {run}/logs/serial-0\.log has the traceback; "
        r"mend the environment or its data, or raise scheduler\.max_quarantined\.",
        command.sentence(),
    ), command.sentence()
    assert len([line for line in command.out if "set aside" in line]) == 5, "not one for each"


@pytest.mark.full
def test_on_ray_the_pools_log_has_the_traceback_and_the_module_is_found_too(smoke: Path, model: Path, tmp_path: Path) -> None:
    write(tmp_path, "True")
    run = tmp_path / "run"
    command = segue("train", config_of(tmp_path, smoke, model), "--run", run, *FEW[:-1])
    assert command.wait() == 2, command.tails()
    assert (
        f"KeyError: 'oops' in bugs.py:{LINE} (env: env_error): {run}/logs/envpool-0.log has the traceback" in command.sentence()
    )
    log = (run / "logs" / "envpool-0.log").read_text()
    assert log.count(f'bugs.py", line {LINE}, in step') == 1, "once per distinct error"


def test_a_run_can_be_evaluated_from_anywhere(smoke: Path, model: Path, tmp_path: Path) -> None:
    write(tmp_path, "False")
    run = tmp_path / "run"
    small = ("--set", "eval.tasks=0", "--set", "checkpoint.every=1", "--set", "steps=1")
    command = segue("train", config_of(tmp_path, smoke, model), "--run", run, *small, "--serial")
    assert command.wait() == 0, command.tails()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = segue("eval", run, "--set", "eval.tasks=2", "--json", cwd=elsewhere)
    assert command.wait() == 0, command.tails()
    assert '"success": 1.0' in "\n".join(command.out)


def test_a_warm_start_needs_a_teacher(smoke: Path, tmp_path: Path) -> None:
    write(tmp_path, "False")
    config = config_of(tmp_path, smoke, None)
    for arguments in (("train", config, "--run", tmp_path / "run"), ("warmstart", config)):
        command = segue(*arguments)
        assert (command.wait(), command.out) == (2, [])
        assert command.sentence() == (
            "The suite task.env = 'bugs:suite' lacks demonstrate and vocabulary, which a warm start needs: "
            "give it one, or name a model in model.path and leave [warmstart] out."
        )
    assert not (tmp_path / "run").exists(), "nothing was begun"
