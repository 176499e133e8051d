"""docs/suites.md: its suite keeps the contract, and its config trains it."""

from __future__ import annotations

import importlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from envpool.environment import Suite, play
from envpool.suites import load_suite

PAGE = Path(__file__).parents[1] / "docs" / "suites.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the two files of the page, which is where we are."""
    page = PAGE.read_text()
    for name, language in (("drawers.py", "python"), ("drawers.toml", "toml")):
        found = re.search(rf"`{name}`:\n\n```{language}\n(.*?)```\n", page, re.DOTALL)
        assert found is not None, f"no {name} on the page"
        (tmp_path / name).write_text(found[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("drawers", None)


@pytest.fixture
def suite(folder: Path) -> Suite:
    return load_suite("drawers:suite", {})


def test_the_splits_are_disjoint_and_as_large_as_the_config_says(suite: Suite) -> None:
    train, held_out = suite.tasks("train", 1000, 0), suite.tasks("eval", 1000, 0)
    assert (len(train), len(held_out)) == (80, 20)
    assert not {task.id for task in train} & {task.id for task in held_out}
    assert suite.tasks("train", 10, 3) == suite.tasks("train", 10, 3) != suite.tasks("train", 10, 4)


def test_the_oracle_succeeds_and_a_mistake_is_an_observation(suite: Suite) -> None:
    for task in suite.tasks("eval", 20, 0):
        assert play(suite.make(task, 0), task, suite.oracle(task)).reward == 1.0
    task = suite.tasks("train", 1, 0)[0]
    muttering = play(suite.make(task, 0), task, lambda observation: "hm")
    assert len(muttering.turns) == 4 and muttering.turns[-1].result.truncated and muttering.success == 0.0


def test_a_restored_environment_goes_on(suite: Suite) -> None:
    task = suite.tasks("train", 1, 0)[0]
    first, second, oracle = suite.make(task, 0), suite.make(task, 0), suite.oracle(task)
    seen = first.step(oracle(first.reset(task, task.seed))).observation
    assert second.restore(first.snapshot()) == seen
    assert second.step(oracle(seen)) == first.step(oracle(seen))


def test_the_teacher_is_of_the_asked_quality(suite: Suite) -> None:
    rng, task = random.Random(0), suite.tasks("train", 1, 0)[0]
    good = sum(len(suite.demonstrate(task, rng, 0.3).turns) == 2 for _ in range(2000)) / 2000
    assert 0.26 < good < 0.34


@pytest.mark.processes
def test_its_config_trains(folder: Path) -> None:
    """As a user would, with a warm start of a few steps and two learner steps."""
    shorter = ["steps=2", "warmstart.steps=5", "group.size=4", "batch.groups=2", "eval.tasks=4"]
    flags = [flag for change in shorter for flag in ("--set", change)]
    command = [sys.executable, "-m", "segue.cli", "train", "drawers.toml", "--serial", "--run", "run", *flags]
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | {"SEGUE_CACHE": "cache"}, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 2
