"""Where a run's time goes: CPU seconds by process, phases from what roles export, and what is said before anything starts."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from benchmarks import profile
from benchmarks.cpu import SUPERVISOR, CpuWatch
from benchmarks.figures import Window
from segue.errors import RunFailed, UserError
from segue.metrics import Metrics
from segue.metrics.samples import Scrape, read_exposition
from segue.rundir import RunDir


def scrape(**targets: Metrics) -> Scrape:
    return {name.replace("_", "-"): read_exposition(generate_latest(m.registry).decode()) for name, m in targets.items()}


def test_phases_are_seconds_per_step_over_all_processes() -> None:
    learner, a, b = Metrics("learner"), Metrics("rollout", "0"), Metrics("rollout", "1")
    sync = Metrics("weightsync", "rollout-0")
    targets = {"learner_0": learner, "rollout_0": a, "rollout_1": b, "weightsync-rollout_0": sync}
    learner.observe("segue_learner_step_seconds", 100.0, phase="backward")
    before = scrape(**targets)
    for _ in range(4):
        learner.observe("segue_learner_step_seconds", 0.5, phase="backward")
    a.add("segue_engine_seconds_total", 1.0, phase="forward")
    b.add("segue_engine_seconds_total", 3.0, phase="forward")
    a.observe("segue_exchange_seconds", 0.25)
    sync.observe("segue_weight_sync_seconds", 2.0, phase="probe")
    found = profile.phases(before, scrape(**targets), steps=4)
    assert found["learner"] == {"backward": {"seconds": 0.5, "times": 1.0}}
    assert found["rollout"]["forward"] == {"seconds": 1.0} and found["rollout"]["sample"] == {"seconds": 0.0}
    assert found["rollout"]["exchange"] == {"seconds": 0.0625, "times": 0.25}
    assert found["update"] == {"probe": {"seconds": 0.5, "times": 0.25}}


def test_cpu_seconds_are_told_by_process_and_moment() -> None:
    moments = profile.Moments(Path("nowhere"), (1, 2))
    moments.heard(os.getpid(), "anything")
    watch = moments.watch
    assert watch is not None
    watch.close()
    moments.started = watch.read()
    for line in ("step  1/9  seconds", "step  2/9  seconds"):
        moments.heard(os.getpid(), line)
    cpu = profile.cpu_figures(moments, Window(1, 2))
    mine = cpu[SUPERVISOR]  # the process that was named
    assert 0.0 < mine["start"] <= mine["whole"] and 0.0 <= mine["window"] <= mine["whole"]


def test_a_target_that_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "")
    watch = CpuWatch(os.getpid())
    watch.close()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        (run.targets / "learner-0.json").write_text(json.dumps([{"targets": [address]}]))
        with pytest.raises(RunFailed, match=r"^learner-0 of the run in .*run did not say what process it is: .*refused.*\.$"):
            watch.name_targets(run.path)


def test_growth_between_two_readings_counts_who_came_in_between_whole() -> None:
    watch = CpuWatch(os.getpid())
    watch.close()
    old, new = (1, 0.0), (2, 5.0)
    watch._kind = {old: "rollout-0", new: "rollout-0"}
    assert watch.between({old: 3.0}, {old: 4.0, new: 2.5}) == {"rollout-0": 3.5}


def some_figures() -> dict[str, Any]:
    return {
        "window": {"first_step": 5, "steps": 4, "seconds": 8.0},
        "tokens_trained": 800.0,
        "tokens_per_second": 100.0,
        "states": {"learner": {"compute": 0.75, "wait_batch": 0.25, "other": 0.0}},
        "phases": {"rollout": {"forward": {"seconds": 0.125}, "exchange": {"seconds": 0.5, "times": 3.0}}},
        "messages_per_step": {"rollout": 94.2},
        "cpu": {
            "rollout-0": {"start": 1.0, "window": 2.0, "whole": 4.0},
            "learner-0": {"start": 1.0, "window": 6.0, "whole": 8.0},
        },
        "functions": {"rollout-0": {"cpu_seconds": 2.0, "self": [{"file": "a/b.py", "function": "f", "seconds": 1.5}] * 3}},
    }


def test_the_table_shows_everything() -> None:
    found = some_figures()
    text = profile.table(found, top=2)
    rows = [line.split() for line in text.splitlines()]
    assert ["learner-0", "1.00", "6.00", "1.500", "8.00"] in rows and ["all", "2.00", "8.00", "2.000", "12.00"] in rows
    assert rows.index(["learner-0", "1.00", "6.00", "1.500", "8.00"]) < rows.index(["rollout-0", "1.00", "2.00", "0.500", "4.00"])
    assert "compute 75.0%, wait_batch 25.0%" in text and "rollout 94" in text and text.count("a/b.py") == 2


def test_impossible_runs_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["profile", "--set", "steps=5"])
    assert profile.main() == 2 and "no steady state" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["profile", "--set", "steps=12"])  # a window of one step
    assert profile.main() == 2
    assert capsys.readouterr().err == ("12 steps leave no steady state of 5 steps with staleness.max_age = 4: use 16 or more.\n")
    monkeypatch.setattr("sys.argv", ["profile", "nowhere.toml"])
    assert profile.main() == 2 and "nowhere.toml" in capsys.readouterr().err
    with pytest.raises(UserError, match="--top"):
        profile.parse(["--top", "0"])


@pytest.mark.parametrize("saved", [False, True])
def test_figures_that_were_not_saved_are_said_to_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: bool
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["profile", "--set", "steps=16", *(["--json", str(out)] if saved else [])])
    monkeypatch.setattr(profile, "profile", lambda *_: some_figures())
    assert profile.main() == 0 and out.exists() == saved
    assert ("Nothing was saved: --json FILE keeps the figures." in capsys.readouterr().out) != saved


@pytest.mark.full
@pytest.mark.processes
def test_a_real_run_says_where_its_time_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, config = tmp_path / "out.json", profile.CONFIG.parent / "smoke.toml"
    monkeypatch.setattr("sys.argv", ["profile", str(config), "--set", "steps=16", "--functions", "--json", str(out)])
    assert profile.main() == 0
    told = json.loads(out.read_text())
    roles = {"scheduler-0", "envpool-0", "rollout-0", "learner-0"}
    assert roles <= set(told["cpu"]) and roles <= set(told["functions"])
    for row in told["cpu"].values():
        assert 0.0 <= row["window"] <= row["whole"]
    for role, states in told["states"].items():
        assert sum(states.values()) == pytest.approx(1.0), role
    phases = told["phases"]
    assert phases["learner"]["forward_backward"]["seconds"] > 0.0 and phases["rollout"]["forward"]["seconds"] > 0.0
    assert phases["update"]["load"]["times"] > 0.0
    assert "functions by own CPU seconds" in capsys.readouterr().out
