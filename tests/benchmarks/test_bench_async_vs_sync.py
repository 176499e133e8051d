"""The benchmark's arithmetic: which steps count, what is divided by what, and what is said of several runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import async_vs_sync as bench
from benchmarks.async_vs_sync import ARMS, CONFIG, STEPS
from benchmarks.figures import Window
from benchmarks.watched import Watched
from envpool.suites import load_suite
from scheduler.tasks import TaskStream
from segue.config import Config, load_config
from segue.config.root import resolve
from segue.errors import RunFailed, UserError


def test_the_arms_differ_in_mode_and_what_follows_from_it_alone() -> None:
    """Same batch, group size, episodes in flight, nodes, slots, threads, learner and environment."""
    args = bench.parse([])
    plans = {arm: bench._plan(args, arm)[0] for arm in ARMS}
    told = {arm: bench.setup(config) for arm, config in plans.items()}
    assert told["async"] == told["sync"] == told["one_step_off"]
    follows = {"mode", "steps", "staleness", "queue", "data"}

    def rest(config: Config) -> dict[str, Any]:
        return {key: value for key, value in config.model_dump().items() if key not in follows}

    assert rest(plans["async"]) == rest(plans["sync"])
    assert {arm: config.staleness.max_age for arm, config in plans.items()} == {"async": 4, "sync": 0, "one_step_off": 1}


def test_sync_can_start_its_whole_batch_at_once() -> None:
    config = load_config(CONFIG)
    assert config.rollout.nodes * config.rollout.max_episodes == config.batch.groups * config.group.size
    assert config.rollout.slots == config.rollout.max_episodes, "no episode waits for an engine slot"


def test_no_latency_comes_near_the_deadline_of_a_step() -> None:
    """A draw above it would time out in every attempt, and with it its episode would be lost."""
    from envpool.suites.latency import LatencyEnvironment, LatencySuite, draw_seconds

    config = load_config(CONFIG)
    suite = load_suite(config.task.env, config.task.args)
    assert isinstance(suite, LatencySuite)
    longest = 0.0
    for task in suite.tasks("train", config.task.train_tasks, config.seed):
        for member in range(config.group.size):
            environment = suite.make(task, member)
            assert isinstance(environment, LatencyEnvironment)
            for turn in range(suite.args.turns_max):
                longest = max(longest, draw_seconds(suite.args, environment._draw(f"{member}/{turn}/seconds")))
    assert 5 * suite.args.mean < longest < config.envpool.step_seconds / 2


# --- windows ----------------------------------------------------------------------------------------------------------------


def test_the_pipeline_fills_and_empties_outside_the_window() -> None:
    assert Window.of(24, 4) == Window(warm=5, last=18)
    assert Window.of(7, 0) == Window(warm=1, last=6)
    assert Window.of(14, 1) == Window(warm=2, last=11)


@pytest.mark.parametrize(("max_age", "least"), [(0, 3), (1, 6), (4, 12)])
def test_a_run_without_a_steady_state_is_refused_with_the_least_number(max_age: int, least: int) -> None:
    for steps in range(1, least):
        with pytest.raises(UserError, match=rf"{steps} steps leave .* use {least} or more"):
            Window.of(steps, max_age)
    assert Window.of(least, max_age).last - Window.of(least, max_age).warm == 1


@pytest.mark.parametrize("arm", ARMS)
def test_the_default_steps_have_a_steady_state(arm: str) -> None:
    config, window = bench._plan(bench.parse([]), arm)
    assert config.steps == STEPS[arm] and window.last - window.warm >= 5


# --- one run ----------------------------------------------------------------------------------------------------------------


def a_line(step: int, elapsed: float, seconds: float, tokens: int, ages: list[int]) -> dict[str, Any]:
    told = {"elapsed_seconds": elapsed, "step_seconds": seconds, "queue_groups": 2, "tokens_masked_age": 1.0}
    return {"step": step, **told, "tokens_trained": float(tokens), "ages": ages}


LINES = [
    a_line(0, 10.0, 10.0, 1000, [1000]),
    a_line(1, 12.0, 2.0, 100, [100]),
    a_line(2, 15.0, 3.0, 200, [100, 0, 100]),
    a_line(3, 30.0, 15.0, 50, [50]),
]


def state(role: str, **seconds: float) -> dict[str, float]:
    return {f'segue_worker_state_seconds_total{{state="{name}"}}': value for name, value in seconds.items()}


def scraped(scale: float) -> dict[str, dict[str, float]]:
    turn, step = "segue_turn_generate_seconds", "segue_env_step_seconds"
    env = 'env="latency"'
    return {
        "rollout-0": {**state("rollout", generate=scale, wait_env=3 * scale), f"{turn}_sum": scale, f"{turn}_count": 10 * scale},
        "rollout-1": {**state("rollout", generate=scale, wait_env=scale), f"{turn}_sum": scale, f"{turn}_count": 0.0},
        "learner-0": state("learner", compute=scale, wait_batch=9 * scale),
        "scheduler-0": {
            **state("scheduler", wait_capacity=scale),
            "segue_messages_received_total": 50 * scale,
            f"segue_episode_duration_seconds_sum{{{env}}}": 60 * scale,
        },
        "envpool-0": {
            **state("envpool", step=scale, wait_action=scale),
            f"{step}_sum{{{env}}}": 8 * scale,
            f"{step}_count{{{env}}}": 10 * scale,
            f'{step}_bucket{{{env},le="0.5"}}': 9 * scale,
            f'{step}_bucket{{{env},le="+Inf"}}': 10 * scale,
        },
    }


def watched() -> Watched:
    summary = {"staleness": {"bound": 4}, "episodes": {"admitted": 3}, "notes": []}
    return Watched(LINES, summary, {1: scraped(1.0), 3: scraped(2.0)})


def test_a_runs_figures_are_those_of_its_window() -> None:
    told = bench.arm_figures(watched(), Window(warm=1, last=3))
    assert told["tokens_per_second"] == pytest.approx(300 / 5)
    assert told["tokens_per_second_to_the_end"] == pytest.approx(350 / 20)
    assert told["window"] == {"first_step": 1, "steps": 2, "seconds": 5.0}
    assert told["step_seconds"] == {"mean": 2.5, "median": 2.5, "max": 3.0}
    assert (told["tokens_per_step"], told["tokens_masked_age"]) == (150, 2)
    assert told["staleness"] == {"bound": 4, "mean": pytest.approx(200 / 300), "p99": 2, "max": 2}
    assert told["env_step_seconds_mean"] == pytest.approx(0.8)
    assert told["turn_generate_seconds_mean"] == pytest.approx(0.2)
    assert told["latency_over_generation"] == pytest.approx(4.0)
    assert told["episodes_in_flight_mean"] == pytest.approx(60 / 5)
    assert told["messages_per_second"] == pytest.approx(50 / 5)
    assert told["idle_share"] == pytest.approx({"rollout": 4 / 6, "learner": 0.9, "scheduler": 1.0, "envpool": 0.5})
    assert told["state_share"]["rollout"]["generate"] == pytest.approx(2 / 6)
    assert told["env_step_seconds_p50"] == pytest.approx(0.5 * 5 / 9)


def test_turns_that_were_not_measured_are_no_result() -> None:
    with pytest.raises(RunFailed, match="segue_turn_generate_seconds observed nothing"):
        bench.turn_seconds(scraped(1.0), scraped(1.0))


def test_the_floor_of_a_synchronous_step_is_its_slowest_episode() -> None:
    def config(**args: Any) -> Config:
        run = load_config(CONFIG, ["mode=sync", "task.train_tasks=20", "seed=3"]).model_dump(exclude_none=True)
        run["task"]["args"] = {"mean": 2.0, "reset_seconds": 0.5, "turns_min": 3, "turns_max": 3, **args}
        return resolve(run, "test")

    assert bench.slowest_episode(config(), range(1, 4)) == pytest.approx(0.5 + 3 * 2.0)
    drawn = config(distribution="lognormal", spread=1.0)
    each = [bench.slowest_episode(drawn, range(step, step + 1)) for step in range(6)]
    assert bench.slowest_episode(drawn, range(2, 6)) == pytest.approx(sum(each[2:]) / 4)
    # The tasks come in the order in which the scheduler's stream gives them, also in the second epoch (20 tasks, 8 a step).
    suite = load_suite("latency", drawn.task.args)
    tasks = suite.tasks("train", 20, 3)
    stream = TaskStream(tasks, 3, shuffle=True)
    for floor in each:
        batch = stream.take(8)
        assert floor == max(bench.latencies(suite, task, member) for task in batch for member in range(4))
    assert len(set(each)) > 1


# --- several runs -----------------------------------------------------------------------------------------------------------


def a_run(rate: float, to_the_end: float, ratio: float) -> dict[str, Any]:
    told = bench.arm_figures(watched(), Window(warm=1, last=3))
    return told | {"tokens_per_second": rate, "tokens_per_second_to_the_end": to_the_end, "latency_over_generation": ratio}


def test_the_speedup_is_the_median_over_pairs() -> None:
    runs = {
        "async": [a_run(300, 250, 5.0), a_run(100, 100, 4.0), a_run(400, 390, 6.0)],
        "sync": [a_run(100, 100, 9.0), a_run(50, 40, 9.0), a_run(100, 100, 3.5)],
    }
    told = bench.summarize(runs)
    assert told["pairs"] == [3.0, 2.0, 4.0]
    assert (told["speedup"], told["speedup_min"], told["speedup_max"]) == (3.0, 2.0, 4.0)
    assert told["speedup_to_the_end"] == 2.5
    assert (told["latency_over_generation_min"], told["env_is_the_bottleneck"]) == (3.5, True)
    assert told["async"]["tokens_per_second"] == 300 and told["sync"]["tokens_per_second"] == 100
    assert told["async"]["tokens_per_second_spread"] == {"median": 300, "min": 100, "max": 400}
    assert len(told["sync"]["runs"]) == 3 and "one_step_off_speedup" not in told
    json.dumps(told)


def test_one_run_in_which_generation_took_too_long_spoils_the_claim() -> None:
    told = bench.summarize({"async": [a_run(1, 1, 2.9)], "sync": [a_run(1, 1, 8.0)], "one_step_off": [a_run(2, 2, 8.0)]})
    assert told["env_is_the_bottleneck"] is False
    assert told["one_step_off_speedup"] == 2.0


# --- the command ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Runs that only record how they were asked for: the arms alternate, and a pair has one seed."""
    asked: list[tuple[str, ...]] = []

    def train(config: Path, run: Path, overrides: list[str], marks: set[int], deadline: float) -> Watched:
        resolved = load_config(config, overrides)
        window = Window.of(resolved.steps, resolved.staleness.max_age)
        assert marks == {window.warm, window.last}
        asked.append((resolved.mode, str(resolved.seed), str(resolved.steps), run.name))
        lines = [a_line(i, 2.0 * (i + 1), 2.0, 100, [100]) for i in range(resolved.steps)]
        return Watched(lines, watched().summary, {window.warm: scraped(1.0), window.last: scraped(2.0)})

    monkeypatch.setattr(bench, "train", train)
    return asked


def test_arms_alternate_and_pairs_share_a_seed(
    scripted: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    command = ["--repeats", "2", "--seed", "7", "--steps", "async=13", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["async_vs_sync", *command])
    assert bench.main() == 0
    assert scripted == [
        ("async", "7", "13", "async-0"),
        ("sync", "7", str(STEPS["sync"]), "sync-0"),
        ("async", "8", "13", "async-1"),
        ("sync", "8", str(STEPS["sync"]), "sync-1"),
    ]
    told: Mapping[str, Any] = json.loads(out.read_text())
    assert told["speedup"] == 1.0 and told["seeds"] == [7, 8] and told["setup"]["episodes_in_flight"] == 32
    assert {"async", "sync", "machine", "versions", "command"} <= set(told)
    assert "async trains 1.00 times" in capsys.readouterr().out


def test_a_benchmark_whose_condition_is_not_met_says_so_and_does_not_exit_0(
    scripted: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "LATENCY_OVER_GENERATION", 4.5)
    monkeypatch.setattr(sys, "argv", ["async_vs_sync", "--repeats", "1"])
    assert bench.main() == 1
    assert "only 4.0 times as long" in capsys.readouterr().err


def test_a_run_that_fails_ends_the_benchmark_with_its_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_: object) -> Watched:
        raise RunFailed("train", "The run in x failed with exit code 1.")

    monkeypatch.setattr(bench, "train", fail)
    monkeypatch.setattr(sys, "argv", ["async_vs_sync", "--json", str(tmp_path / "out.json")])
    assert bench.main() == 1
    assert capsys.readouterr().err.strip() == "The run in x failed with exit code 1."
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("steps", ["sync", "sync=0", "sync=x", "other=3"])
def test_steps_are_given_by_arm(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(["--steps", steps])
    assert "is not ARM=STEPS" in capsys.readouterr().err


def test_too_few_steps_are_a_users_mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["async_vs_sync", "--steps", "async=11"])
    assert bench.main() == 2
    assert "11 steps leave no steady state" in capsys.readouterr().err


# --- for real ---------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.processes
def test_a_real_pair(tmp_path: Path) -> None:
    """Whole runs on Ray, as short as a window allows. What is checked is what they are made of, not how fast they were."""
    args = bench.parse(["--repeats", "1", "--steps", "async=13", "sync=3"])
    told = bench.measure(args, tmp_path)
    ours, theirs = told["async"]["runs"][0], told["sync"]["runs"][0]
    assert ours["staleness"]["mean"] > 0 and ours["staleness"]["max"] <= 4
    assert theirs["slowest_episode_seconds"] < theirs["step_seconds"]["mean"]
    assert theirs["staleness"]["max"] == 0 and theirs["tokens_masked_age"] == 0
    for run in (ours, theirs):
        assert run["episodes"]["failed"] == {} and run["notes"] == []
        assert sum(run["state_share"]["rollout"].values()) == pytest.approx(1.0)
        assert run["env_step_seconds_p99"] > 3 * run["env_step_seconds_p50"], "the tail is heavy"
    assert ours["episodes_in_flight_mean"] > theirs["episodes_in_flight_mean"]


def test_the_config_is_a_users_run_too() -> None:
    config = load_config(CONFIG)
    assert (config.mode, config.task.env) == ("async", "latency")
    assert resolve(config.model_dump(exclude_none=True), "again") == config
