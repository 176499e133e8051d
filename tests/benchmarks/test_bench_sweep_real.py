"""Real sweeps: which runs there are, in which order, what is divided by what; and (`full`) a small one with all its processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ceilings, env_latency, straggler, sweep_real
from benchmarks.ceilings import Ceilings
from benchmarks.figures import Window
from benchmarks.results_folder import Kept
from benchmarks.sweep import parser, plan
from benchmarks.sweep_figures import At, Point, gathered
from benchmarks.sweep_plan import Plan
from benchmarks.watched import Watched
from segue.config import load_config
from segue.errors import RunFailed, UserError

LENGTHS = {"sync": 30.0, "async_keep": 30.0, "sync_redundant": 24.0}
"""Tokens of a trained episode, by arm: redundancy loses long ones."""


def line(step: int, length: float) -> dict[str, Any]:
    tokens = {"tokens_trained": 4 * length, "tokens_generated": 4 * length, "trajectories": 4.0}
    masked = {"tokens_masked_age": 0.0, "tokens_masked_outcome": 0.0}
    return {"step": step, "elapsed_seconds": 2.0 * (step + 1), "step_seconds": 2.0, "ages": [4 * length], **tokens, **masked}


def scrape(scale: float) -> dict[str, dict[str, float]]:
    counted = {"segue_turn_generate_seconds_sum": 3.0, "segue_turn_generate_seconds_count": 2.0, "segue_decode_tokens_total": 9.0}
    env = {'segue_env_step_seconds_sum{env="latency"}': 8.0, 'segue_env_step_seconds_count{env="latency"}': 2.0}
    return {
        "rollout-0": {name: value * scale for name, value in counted.items()},
        "envpool-0": {name: value * scale for name, value in env.items()},
    }


class Scripted:
    """Stands in for `segue train`: notes what is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.fails = ""
        monkeypatch.setattr(sweep_real, "train", self.train)
        monkeypatch.setattr(ceilings, "measure", self.ceilings)
        monkeypatch.setattr(ceilings, "generation_seconds", self.generation_seconds)

    def train(self, source: Path, run: Path, overrides: list[str], marks: set[int], deadline: float) -> Watched:
        config = load_config(source, overrides)
        window = Window.of(config.steps, config.staleness.max_age)
        assert marks == {window.warm, window.last} and run.parent.is_dir()
        inflight = config.update.inflight if config.mode == "async" else ""
        arm = "_".join(filter(None, (config.mode, inflight, "redundant" if config.group.redundancy else "")))
        self.asked.append((arm, str(config.seed), str(config.steps), f"{config.task.args['mean']:g}"))
        if arm == self.fails:
            raise RunFailed("rollout", "A node died.")
        lines = [line(step, LENGTHS[arm]) for step in range(config.steps)]
        summary = {"tokens": {"generated": 200.0 * config.steps}}
        return Watched(lines, summary, {window.warm: scrape(1.0), window.last: scrape(2.0)})

    def ceilings(self, source: Path, overrides: list[str], folder: Path) -> Ceilings:
        config = load_config(source, overrides)
        self.asked.append(("ceilings", str(config.seed), f"{config.task.args['mean']:g}"))
        return Ceilings(100.0, 80.0, 0.1, 0.01, 0.02, 0.5, unknown_share=0.0)

    def generation_seconds(self, source: Path, overrides: tuple[str, ...], folder: Path) -> float:
        self.asked.append(("generation",))
        return 0.05


def asked(*arguments: str) -> Plan:
    chosen = ["--real", "--spreads", "1", "--arms", *LENGTHS]
    return plan(env_latency.SWEEP, parser(env_latency.SWEEP, None).parse_args([*chosen, *arguments]))


def measured(plan: Plan, point: Point, out: Path) -> At:
    return gathered(point, [sweep_real.measure_seed(plan, point, seed, Kept(out)) for seed in plan.seeds])


def test_ceilings_come_first_and_arms_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Scripted(monkeypatch)
    at = measured(asked("--repeats", "2", "--seed", "7"), Point(4.0, 1.0), tmp_path)
    steps = load_config(sweep_real_config()).steps
    window = Window.of(steps, 4)
    short = str(window.steps(0))
    assert runs.asked == [
        ("generation",),
        *(
            run
            for seed in ("7", "8")
            for run in (
                ("ceilings", seed, "0.2"),
                ("sync", seed, short, "0.2"),
                ("sync_redundant", seed, short, "0.2"),
                ("async_keep", seed, str(steps), "0.2"),
            )
        ),
    ]
    assert at.more["generation_seconds"] == 0.05 and at.more["training_wait_share"] == 0.02
    for name, found in at.runs.items():
        assert [one.seed for one in found] == [7, 8]
        for one in found:
            rate = 4 * LENGTHS[name] / 2.0
            assert one.figures.tokens_per_second == pytest.approx(rate)
            assert one.figures.efficiency is not None and one.figures.efficiency.value == pytest.approx(rate / 80.0)
            assert one.more == {"turn_generate_seconds": 1.5, "env_step_seconds": 4.0}
            assert one.figures.steps == window.last - window.warm
    assert "latency/generation 4, spread 1, seed 8, async_keep: 60 tokens/s, efficiency 0.750" in capsys.readouterr().out


def sweep_real_config() -> Path:
    return asked().source


def test_lengths_are_compared_with_those_of_the_synchronous_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Scripted(monkeypatch)

    def biases(out: str, *arguments: str) -> Mapping[str, float | None]:
        at = measured(asked("--no-ceilings", *arguments), Point(0.0, 1.0), tmp_path / out)
        return {name: runs[0].figures.length_bias for name, runs in at.runs.items()}

    assert biases("all") == pytest.approx({"sync": 1.0, "sync_redundant": 0.8, "async_keep": 1.0})
    alone = biases("some", "--arms", "sync_redundant", "async_keep")
    assert alone == {"sync_redundant": 1.0, "async_keep": 1.0}, "nothing to compare with"


@pytest.mark.parametrize("failing", ["sync", "async_keep"])
def test_a_run_that_fails_costs_no_other(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended before it is kept to the last bit, ceilings and the time of an action too, and none of it runs again."""
    point, plan = Point(4.0, 1.0), asked()
    runs = Scripted(monkeypatch)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the folder of a run that failed stays
    whole = measured(plan, point, tmp_path / "whole")
    names = [run[0] for run in runs.asked]
    runs.fails, runs.asked = failing, []
    with pytest.raises(RunFailed, match="A node died"):
        measured(plan, point, tmp_path / "cut")
    assert [run[0] for run in runs.asked] == names[: names.index(failing) + 1]
    runs.fails, runs.asked = "", []
    assert measured(plan, point, tmp_path / "cut") == whole
    assert [run[0] for run in runs.asked] == names[names.index(failing) :]
    for path in (tmp_path / "cut" / "runs").glob(f"*-{failing}.json"):
        path.write_text("{")
        with pytest.raises(UserError, match=r"cannot be read \(.*\): remove it, and it is measured again"):
            measured(plan, point, tmp_path / "cut")


SMALL = (
    "warmstart.hidden_size=64",
    "warmstart.layers=2",
    "warmstart.heads=2",
    "warmstart.intermediate_size=128",
    "batch.groups=4",
    "rollout.slots=16",
    "rollout.idle_slots=16",
    "rollout.max_episodes=32",
    "envpool.instances=16",
)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("benchmark", [straggler, env_latency], ids=lambda benchmark: benchmark.SWEEP.name)
def test_a_small_real_sweep(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole runs on Ray. What is checked is that all of it is there and consistent, not how fast it was."""
    monkeypatch.chdir(tmp_path)
    sets = [part for item in SMALL for part in ("--set", item)]
    point = ["--points", "3"] if benchmark is straggler else ["--points", "2", "--spreads", "1"]
    arguments = ["--real", *point, "--arms", "sync", "async_keep", "--steps", "14", "--out", "out", *sets]
    assert benchmark.main(arguments) == 0
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    (found,) = told["points"]
    assert told["time"] == "real" and told["missing"] == [] and set(found["arms"]) == {"sync", "async_keep"}
    assert found["generation_ceiling"] > 0 and found["training_ceiling"] > 0
    for name, arm in found["arms"].items():
        (run,) = arm["runs"]
        assert arm["efficiency"] == pytest.approx(
            arm["tokens_per_second"] / min(found["generation_ceiling"], found["training_ceiling"])
        )
        assert run["figures"]["steps"] == Window.of(14, 4).last - Window.of(14, 4).warm
        assert all(sum(shares.values()) == pytest.approx(1.0) for shares in run["figures"]["state_share"].values()), name
    sync, ours = found["arms"]["sync"], found["arms"]["async_keep"]
    assert (sync["staleness_max"], sync["staleness_bound"]) == (0, 0) and 0 < ours["staleness_max"] <= 4
    assert sync["length_bias"] == pytest.approx(1.0, abs=0.2) and ours["reprefill_share"] is not None
    text = (tmp_path / "out" / "index.html").read_text()
    assert text.count("<svg role='img'") == 4 and "cores" in text
