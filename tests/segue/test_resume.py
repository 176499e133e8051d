"""What a resume refuses, before it has changed anything, and what it makes of an earlier attempt's bounds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tomli_w

from segue.cluster.prepare import prepare
from segue.cluster.roles import RoleSpec
from segue.cluster.wiring import Place, build_host
from segue.config import load_config, to_toml
from segue.errors import UserError
from segue.report.read import age_bound
from segue.rundir import SCHEDULER_CUT, RunDir
from weightsync.local import LocalHub

WARMSTART = {"hidden_size": 64, "heads": 2, "threads": 1}


def config_file(path: Path, **tables: object) -> Path:
    path.write_text(tomli_w.dumps({"steps": 9, "task": {"env": "latency"}, "warmstart": WARMSTART, **tables}))
    return path


def begun(folder: Path, config: Path) -> RunDir:
    """A run with a checkpoint of step 3, as far as a look at its files can tell."""
    run = RunDir.create(folder / "run", to_toml(load_config(config)))
    (run.checkpoints / "step_3").mkdir()
    (run.checkpoints / "step_3" / "COMPLETE").touch()
    run.unlock()
    return run


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("warmstart.hidden_size=96", "warmstart.hidden_size = 64"),
        ("warmstart.steps=7", "warmstart.steps = 400"),
        ("task.env=search_qa", "task.env = 'latency'"),
    ],
)
def test_another_model_or_suite_is_refused(tmp_path: Path, override: str, key: str) -> None:
    """The weights would fit no node, or the tasks that are still to be done no environment."""
    config = config_file(tmp_path / "my.toml")
    run = begun(tmp_path, config)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.name != ".lock"}
    with pytest.raises(UserError, match=f"was begun with {key}, and a resumed run cannot change it to .*: set it back"):
        prepare(config, [override], run.path, resume=True, serial=True)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.name != ".lock"} == before


def test_what_may_change_may_change_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_file(tmp_path / "my.toml")
    run = begun(tmp_path, config)
    monkeypatch.setattr("segue.cluster.prepare.find_model", lambda config: "there")
    overrides = ["warmstart.threads=2", "learner.lr=1e-5", "staleness.max_age=1", "group.size=4"]
    assert prepare(config, overrides, run.path, resume=True, serial=True).resume.endswith("step_3")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  changed   ")]
    for change in ("group.size 8 → 4", "learner.lr 0.0003 → 1e-05", "staleness.max_age 4 → 1", "warmstart.threads 1 → 2"):
        assert change in line
    assert "seed" not in line


def test_a_resume_that_changes_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_file(tmp_path / "my.toml")
    run = begun(tmp_path, config)
    monkeypatch.setattr("segue.cluster.prepare.find_model", lambda config: "there")
    prepare(config, [], run.path, resume=True, serial=True)
    assert "  changed   nothing since the last attempt" in capsys.readouterr().out.splitlines()


def test_too_many_tasks_are_found_before_anything_is_made(tmp_path: Path) -> None:
    config = config_file(tmp_path / "my.toml", task={"env": "search_qa", "args": {"facts": ["elements"], "digits": 2}})
    for key in ("task.train_tasks", "eval.tasks"):
        with pytest.raises(UserError, match=rf"^{key} = 100000 cannot be had: the suite search_qa has \d+ .* tasks"):
            prepare(config, [f"{key}=100000"], tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()


def test_tokens_of_an_earlier_attempt_are_measured_by_its_bound(tmp_path: Path) -> None:
    config = config_file(tmp_path / "my.toml", staleness={"max_age": 6})
    run = begun(tmp_path, config)
    now = load_config(config, ["staleness.max_age=2"])
    assert age_bound(run, now) == 2
    RunDir.resume(run.path, to_toml(now)).unlock()
    assert age_bound(run, now) == 6


@pytest.mark.parametrize("content", [None, b"", b"\x93rubbish"])
def test_a_damaged_cut_is_the_checkpoints_damage(tmp_path: Path, content: bytes | None) -> None:
    """The scheduler may read it before the learner has checked every file."""
    config = config_file(tmp_path / "my.toml")
    run = begun(tmp_path, config)
    folder = run.checkpoints / "step_3"
    if content is not None:
        (folder / SCHEDULER_CUT).write_bytes(content)
    spec = RoleSpec("scheduler", 0, 1, str(run.path), to_toml(load_config(config)), "there", resume=str(folder))

    async def build() -> None:
        await build_host(spec, Place(asyncio.get_running_loop().time, LocalHub()))

    with pytest.raises(UserError, match=r"step_3 is damaged \(scheduler.cut is not what was written\): remove that folder"):
        asyncio.run(build())
