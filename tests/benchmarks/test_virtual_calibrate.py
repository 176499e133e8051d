"""Calibration: what a world was made of is found again from its scrapes, and predicts a run that was not looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from virtual_world import small

from benchmarks.figures import Window
from benchmarks.virtual import calibrate
from benchmarks.virtual.calibrate import Observed, Turns, fit, fit_engine, fit_learner, nonnegative, observe, predict
from benchmarks.virtual.measure import measure
from benchmarks.virtual.scenario import World
from benchmarks.virtual.world import play
from segue.errors import RunFailed

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "latency.toml"


def test_least_squares_without_negative_terms_is_the_best_on_a_grid() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        a, y = rng.uniform(0.0, 1.0, (6, 2)), rng.uniform(-0.5, 1.0, 6)
        found = nonnegative(a, y)
        u, v = np.meshgrid(np.linspace(0.0, 2.0, 401), np.linspace(0.0, 2.0, 401))
        least = min(np.sum((a[:, :1] * u.reshape(1, -1) + a[:, 1:] * v.reshape(1, -1) - y[:, None]) ** 2, axis=0))
        assert min(found) >= 0.0
        assert float(np.sum((a @ np.array(found) - y) ** 2)) <= least + 1e-9


def window_of(fixed: float, per_request: float, prefill: float, running: float, prefilled_share: float) -> Turns:
    """What a window shows of an engine with these costs."""
    sampled = 10_000.0
    prefilled = prefilled_share * sampled
    generate = sampled / running * (fixed + per_request * running) + prefill * prefilled
    return Turns(32, 250.0, running * generate, generate, sampled, prefilled)


def test_the_engines_costs_are_found_from_windows_that_differ() -> None:
    windows = [window_of(0.02, 0.003, 2e-4, b, share) for b, share in ((1.5, 0.5), (4.0, 2.0), (9.0, 1.0), (14.0, 4.0))]
    found = fit_engine(windows)
    assert found.decode_seconds == pytest.approx(0.02, rel=1e-6)
    assert found.decode_seconds_per_request == pytest.approx(0.003, rel=1e-6)
    assert found.prefill_seconds_per_token == pytest.approx(2e-4, rel=1e-6)


def test_the_learners_line_and_one_that_does_not_rise() -> None:
    rising = fit_learner([(100.0, 1.2), (200.0, 1.4), (400.0, 1.8)], 0.5)
    assert (rising.step_seconds, rising.seconds_per_token, rising.gather_seconds) == pytest.approx((1.0, 0.002, 0.5))
    falling = fit_learner([(100.0, 1.4), (200.0, 1.2), (400.0, 1.0)], 0.0)
    assert falling.seconds_per_token == 0.0 and falling.step_seconds == pytest.approx(1.2)


def world(episodes: int, **config: Any) -> World:
    rollout = {"max_episodes": episodes, "slots": 8, "nodes": 2}
    return small(
        config={"steps": 10, "batch": {"groups": 3}, "rollout": rollout, "group": {"size": 3}} | config,
        engine={"decode_seconds_per_kv_token": 0.0, "kv_tokens": 100_000},
        workload={"turns": {"kind": "constant", "mean": 4.0}, "action_tokens": {"kind": "constant", "mean": 40.0}},
    )


def seen(played: World) -> Observed:
    window = Window.of(played.config.steps, played.config.staleness.max_age)
    ran = play(played, (window.warm, window.last))
    return observe(ran.lines, ran.scrapes[window.warm], ran.scrapes[window.last], window, played.config.rollout.slots)


@pytest.mark.processes
def test_a_held_out_run_is_predicted_from_two_others() -> None:
    observed = [seen(world(2)), seen(world(7))]
    scenario, values = fit(observed, world(2).config)
    assert scenario.engine.decode_seconds == pytest.approx(0.05, rel=0.25)
    assert scenario.workload.action_tokens.mean == pytest.approx(40.0, rel=0.1)
    assert scenario.workload.observation_tokens.mean == pytest.approx(30.0, rel=0.15)
    assert np.mean(values["env.step_seconds"]) == pytest.approx(3.0, rel=0.2)
    held_out = world(4, seed=7)
    actual, _ = measure(held_out, ceilings=False)
    assert predict(scenario, values, held_out.config) == pytest.approx(actual.tokens_per_second, rel=0.15)


def test_engines_that_did_nothing_cannot_be_calibrated() -> None:
    with pytest.raises(RunFailed, match="too short to calibrate"):
        observe([{"tokens_generated": 1.0}] * 2, {}, {}, Window(1, 2), 4)


# --- the command ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fits", "held_out", "sentence"),
    [
        (["rollout.max_episodes=4"], "rollout.max_episode=8", "did you mean rollout.max_episodes?"),
        (["rollout.max_episodes=4"], "steps=7", "7 steps leave no steady state"),
        (["rollout.max_episodes=4", "rollout.slot=3"], "rollout.max_episodes=8", "did you mean rollout.slots?"),
        (["rollout.max_episodes"], "rollout.max_episodes=8", "is not key=value"),
    ],
)
def test_a_mistake_in_any_run_is_found_before_the_first_one(
    fits: list[str], held_out: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "train", lambda *asked: pytest.fail("nothing may run"))
    told = [part for item in fits for part in ("--fit", item)]
    monkeypatch.setattr("sys.argv", ["calibrate", str(CONFIG), *told, "--held-out", held_out])
    assert calibrate.main() == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


@pytest.mark.full
@pytest.mark.processes
def test_real_runs_are_fitted_and_another_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three short runs on Ray; how near the prediction comes is for a quiet machine to say."""
    out = tmp_path / "out.json"
    fits = ["--fit", "rollout.max_episodes=4", "--fit", "rollout.max_episodes=16", "--held-out", "rollout.max_episodes=8"]
    short = ["--set", "steps=14", "--set", "batch.groups=4"]
    monkeypatch.setattr("sys.argv", ["calibrate", str(CONFIG), *fits, *short, "--json", str(out)])
    assert calibrate.main() == 0
    told = json.loads(out.read_text())
    assert told["error"] == pytest.approx(told["predicted_tokens_per_second"] / told["actual_tokens_per_second"] - 1.0)
    assert abs(told["error"]) < 0.6 and told["holds"] == (abs(told["error"]) <= 0.15) and told["seeds"] == [0]
    assert told["fitted"]["engine"]["decode_seconds"] + told["fitted"]["engine"]["decode_seconds_per_request"] > 0.0
    assert "off by" in capsys.readouterr().out
