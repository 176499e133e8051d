"""What `segue eval` refuses, in its own words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from segue.cluster.evaluate import evaluate
from segue.errors import UserError
from segue.rundir import RunDir

CONFIG = 'steps = 5\n[task]\nenv = "latency"\n[model]\npath = "m"\n'


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    for step in (None, 3):
        with pytest.raises(UserError) as refused:
            evaluate(run.path, [], step, False)
        assert str(refused.value) == (
            f"{run.path} has no complete checkpoint to evaluate: name another run, or {run.config} for the model it starts from."
        )


def test_what_is_neither_run_nor_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nosuch is neither a run directory nor a config file: name one that exists"):
        evaluate(tmp_path / "nosuch", [], None, False)


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no --run to name another directory with."""
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").touch()
    (tmp_path / "my.toml").write_text(CONFIG)
    (tmp_path / "runs").touch()  # a file, so that no folder can be made there
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"^The run directory runs{os.sep}eval-my-.* call segue eval in a folder that"):
        evaluate(tmp_path / "my.toml", [], None, False)
