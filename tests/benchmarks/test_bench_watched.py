"""Following a run from outside: its console lines, and what its targets export, against the real writers of both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from benchmarks.watched import grown, quantile, read_exposition, steps_done, total, train
from segue.errors import RunFailed
from segue.metrics import Metrics, StateClock
from segue.metrics.registry import read_sample
from segue.metrics.vocabulary import STATES
from segue.report import step_line, step_text


@pytest.mark.parametrize("step", [0, 8, 9, 99])
def test_a_step_is_recognised_on_the_console_as_the_run_prints_it(step: int) -> None:
    bill = {"tokens": 0, "seconds": 0.0, "updates": 0, "coalesced": 0, "inflight": "recompute"}
    line = step_line(
        step,
        elapsed_seconds=1,
        step_seconds=1,
        wait_seconds=0,
        version=1,
        queue_groups=0,
        in_flight=0,
        ages=[5],
        reprefill=bill,
        stats={},
    )
    assert steps_done(step_text(line, 100)) == step + 1


@pytest.mark.parametrize("line", ["eval before training: success 0.1", "  steps     3/4", "a step 3/4 was made", ""])
def test_no_other_line_is(line: str) -> None:
    assert steps_done(line) == 0


def exported(metrics: Metrics) -> dict[str, float]:
    """Through the text that an exporter serves."""
    return read_exposition(generate_latest(metrics.registry).decode())


def parts(samples: Mapping[str, float]) -> dict[Any, float]:
    """By name and labels, in whatever order a writer puts these."""
    return {(name, *sorted(labels.items())): value for key, value in samples.items() for name, labels in [read_sample(key)]}


def test_an_exposition_is_read_as_it_was_written() -> None:
    time = [0.0]
    clock = StateClock(STATES["scheduler"], lambda: time[0])
    metrics = Metrics("scheduler", envs=("latency",))
    metrics.attach(clock)
    with clock.in_state("dispatch"):
        time[0] = 2.5
    metrics.observe("segue_episode_duration_seconds", 7.0, env="latency")
    samples = exported(metrics)
    assert parts(samples) == pytest.approx(parts(metrics.snapshot()))
    assert samples['segue_worker_state_seconds_total{state="dispatch"}'] == 2.5


def test_growth_is_summed_over_a_roles_processes_and_the_labels_left_out() -> None:
    a, b, other = Metrics("rollout", "0"), Metrics("rollout", "1"), Metrics("envpool", envs=("latency",))
    name = "segue_prefill_tokens_total"
    a.add(name, 100, cause="first")
    before = {"rollout-0": exported(a), "rollout-1": exported(b), "envpool-0": exported(other)}
    a.add(name, 5, cause="first")
    a.add(name, 20, cause="turn")
    b.add(name, 7, cause="first")
    after = {"rollout-0": exported(a), "rollout-1": exported(b), "envpool-0": exported(other)}
    assert grown(before, after, "rollout", name) == 32
    assert grown(before, after, "rollout", name, cause="first") == 12
    assert grown(before, after, "envpool", name) == 0
    assert total(after, "rollout", name) == 132


def test_targets_of_weight_sync_inside_a_role_are_not_the_roles() -> None:
    samples = {'segue_worker_state_seconds_total{state="other"}': 3.0}
    assert total({"weightsync-rollout-0": samples}, "rollout", "segue_worker_state_seconds_total") == 0


def test_quantiles_are_those_of_what_came_between_and_interpolated() -> None:
    metrics = Metrics("envpool", envs=("latency",))
    name = "segue_env_step_seconds"
    for _ in range(50):
        metrics.observe(name, 400.0, env="latency")
    before = {"envpool-0": exported(metrics)}
    assert quantile(before, before, "envpool", name, 0.5) is None
    for _ in range(90):
        metrics.observe(name, 0.2, env="latency")  # in (0.1, 0.25]
    for _ in range(10):
        metrics.observe(name, 2.0, env="latency")  # in (1, 2.5]
    after = {"envpool-0": exported(metrics)}
    assert quantile(before, after, "envpool", name, 0.5) == pytest.approx(0.1 + 0.15 * 50 / 90)
    assert quantile(before, after, "envpool", name, 0.95) == pytest.approx(1.0 + 1.5 * 5 / 10)
    metrics.observe(name, 1e6, env="latency")  # beyond the last edge
    assert quantile(before, {"envpool-0": exported(metrics)}, "envpool", name, 1.0) == 600.0


@pytest.mark.processes
def test_a_run_that_cannot_start_is_told_with_its_own_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"There is no config file .*none\.toml(.|\n)*exit code 2"):
        train(tmp_path / "none.toml", tmp_path / "run", [], {1}, deadline=60.0)
