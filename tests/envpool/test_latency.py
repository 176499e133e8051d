"""The synthetic suite: its distributions, its faults, and that all of it comes from the seed."""

from __future__ import annotations

import math
import random
import re
import statistics
from typing import Any

import pytest

from envpool.environment import SimulatedCrash
from envpool.suites import load_suite
from envpool.suites.latency import LatencyArgs, LatencyEnvironment, build, draw_seconds
from segue.errors import UserError


def deferred(args: dict[str, Any], seed: int = 1, member: int = 0, attempt: int = 1) -> LatencyEnvironment:
    suite = build(args)
    task = suite.tasks("train", 1, seed)[0]
    environment = suite.make(task, member, attempt)
    assert isinstance(environment, LatencyEnvironment)
    environment.defer()
    environment.reset(task, task.seed)
    return environment


@pytest.mark.parametrize(
    ("distribution", "spread", "median"),
    [
        ("constant", 0.0, 2.0),
        ("gaussian", 0.5, 2.0),
        ("lognormal", 1.0, 2.0 * math.exp(-0.5)),
        ("pareto", 3.0, 4 * (2 ** (1 / 3) - 1)),
    ],
)
def test_distributions_have_their_mean_and_median(distribution: Any, spread: float, median: float) -> None:
    args = LatencyArgs(distribution=distribution, mean=2.0, spread=spread)
    draws = [draw_seconds(args, random.Random(seed)) for seed in range(8000)]
    assert min(draws) >= 0.0
    assert statistics.mean(draws) == pytest.approx(2.0, rel=0.06)
    assert statistics.median(draws) == pytest.approx(median, rel=0.05)


def test_noise_sets_the_rewards_of_a_group_apart_and_comes_from_task_and_member() -> None:
    def reward(member: int, **args: float) -> float:
        environment = deferred({"turns_min": 2, "turns_max": 2, **args}, member=member)
        environment.step("x")
        return environment.step("x").reward

    assert [reward(member) for member in range(3)] == [0.0] * 3
    noisy = [reward(member, noise=0.5) for member in range(3)]
    assert len(set(noisy)) == 3 and all(0.0 <= each < 0.5 for each in noisy)
    assert [reward(member, noise=0.5) for member in range(3)] == noisy


def test_gaussian_is_clipped_at_zero() -> None:
    args = LatencyArgs(distribution="gaussian", mean=0.1, spread=1.0)
    draws = [draw_seconds(args, random.Random(seed)) for seed in range(1000)]
    assert min(draws) == 0.0 and 0.4 < draws.count(0.0) / 1000 < 0.5


def test_times_are_drawn_from_task_member_and_turn_alone() -> None:
    args = {"turns_min": 5, "turns_max": 5, "distribution": "lognormal", "mean": 1.0, "spread": 1.0}

    def times(**who: int) -> list[float]:
        environment = deferred(args, **who)
        found = []
        for _ in range(5):
            random.random()
            environment.step("x")
            found.append(environment.owed())
        return found

    assert times() == times() == times(attempt=2)
    assert len({tuple(times(member=member)) for member in range(4)} | {tuple(times(seed=2))}) == 5


def test_real_and_deferred_instances_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("envpool.suites.latency.time.sleep", slept.append)
    args = {"turns_min": 3, "turns_max": 3, "distribution": "pareto", "mean": 1.0, "spread": 1.5, "reset_seconds": 0.5}
    suite = build(args)
    task = suite.tasks("train", 1, 1)[0]
    real = suite.make(task, 0)
    modelled = deferred(args)
    owed = [modelled.owed()]
    real.reset(task, task.seed)
    for _ in range(3):
        assert real.step("x") == modelled.step("x")
        owed.append(modelled.owed())
    assert slept == owed and owed[0] == 0.5


def test_burning_takes_cpu_time_instead_of_sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("envpool.suites.latency.time.thread_time", lambda: float(next(clock)))
    monkeypatch.setattr("envpool.suites.latency.time.sleep", None)
    suite = build({"mean": 10.0, "burn": True})
    task = suite.tasks("train", 1, 1)[0]
    environment = suite.make(task, 0)
    environment.reset(task, task.seed)
    environment.step("x")
    assert next(clock) >= 12


@pytest.mark.parametrize("fault", ["exception", "crash", "hang"])
def test_faults_come_at_their_rate_and_pass_or_stay(fault: str) -> None:
    args = {"turns_min": 1, "turns_max": 1, fault: 0.3}

    def faulty(seed: int, attempt: int, transient: bool) -> bool:
        environment = deferred(args | {"transient": transient}, seed=seed, attempt=attempt)
        try:
            environment.step("x")
        except SimulatedCrash:
            return fault == "crash"
        except RuntimeError:
            return fault == "exception"
        return environment.owed() == math.inf

    first = [faulty(seed, 1, True) for seed in range(120)]
    again = [faulty(seed, 2, True) for seed in range(120)]
    assert 0.18 < statistics.mean(first) < 0.42 and 0.18 < statistics.mean(again) < 0.42 and first != again
    assert [faulty(seed, 1, False) for seed in range(120)] == [faulty(seed, 2, False) for seed in range(120)]


def test_slow_resets_and_lengths() -> None:
    resets = [deferred({"slow_reset": 0.25, "slow_reset_seconds": 9.0, "reset_seconds": 1.0}, seed=s).owed() for s in range(200)]
    assert set(resets) == {1.0, 9.0} and 0.15 < resets.count(9.0) / 200 < 0.35
    suite = build({"turns_min": 2, "turns_max": 6, "words_min": 1, "words_max": 9})
    turns: set[int] = set()
    words: set[int] = set()
    for task in suite.tasks("train", 100, 0):
        demo = suite.demonstrate(task, random.Random(0), 1.0)
        turns.add(len(demo.turns))
        words.update(len(turn.result.observation.messages[-1].content.split()) - 2 for turn in demo.turns)
    assert turns == {2, 3, 4, 5, 6} and words == set(range(1, 10))


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ({"turns_min": 5, "turns_max": 4}, "task.args.turns_min = 5 is above"),
        ({"words_min": 5, "words_max": 4}, "task.args.words_min = 5 is above"),
        ({"distribution": "pareto", "mean": 1.0, "spread": 1.0}, "above 1"),
        ({"distribution": "poisson"}, "task.args.distribution = 'poisson'"),
        ({"hang": 1.5}, "task.args.hang = 1.5"),
        ({"mean": -1.0}, "task.args.mean = -1.0"),
        ({"means": 1.0}, "did you mean task.args.mean"),
    ],
)
def test_bad_arguments_get_a_sentence(args: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=re.escape(part)) as caught:
        load_suite("latency", args)
    assert "\n" not in str(caught.value)
