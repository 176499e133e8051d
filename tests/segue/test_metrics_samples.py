"""What processes export, read back and compared in time, against the real writer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client import generate_latest

from segue.metrics import Metrics, StateClock
from segue.metrics.samples import difference, grown, quantile, read_exposition, read_sample, sample_name, total
from segue.metrics.vocabulary import STATES


def exported(metrics: Metrics) -> dict[str, float]:
    """Through the text that an exporter serves."""
    return read_exposition(generate_latest(metrics.registry).decode())


def parts(samples: Mapping[str, float]) -> dict[Any, float]:
    """By name and labels, in whatever order a writer puts these."""
    return {(name, *sorted(labels.items())): value for key, value in samples.items() for name, labels in [read_sample(key)]}


def test_an_exposition_is_read_as_it_was_written() -> None:
    time = [0.0]
    clock = StateClock(STATES["scheduler"], lambda: time[0])
    metrics = Metrics("scheduler", envs=("latency",), monotonic=lambda: time[0])
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
    assert quantile(difference(before, before), "envpool", name, 0.5) is None
    for _ in range(90):
        metrics.observe(name, 0.2, env="latency")  # in (0.1, 0.25]
    for _ in range(10):
        metrics.observe(name, 2.0, env="latency")  # in (1, 2.5]
    after = {"envpool-0": exported(metrics)}
    assert quantile(difference(before, after), "envpool", name, 0.5) == pytest.approx(0.1 + 0.15 * 50 / 90)
    assert quantile(difference(before, after), "envpool", name, 0.95) == pytest.approx(1.0 + 1.5 * 5 / 10)
    metrics.observe(name, 1e6, env="latency")  # beyond the last edge
    assert quantile(difference(before, {"envpool-0": exported(metrics)}), "envpool", name, 1.0) == 600.0


def test_a_process_that_began_anew_counts_from_zero_and_gauges_are_no_growth() -> None:
    name = "segue_prefill_tokens_total"
    old, new, came = Metrics("rollout", "0"), Metrics("rollout", "0"), Metrics("rollout", "1")
    old.add(name, 100, cause="first")
    old.add(name, 3, cause="turn")
    new.add(name, 7, cause="first")
    new.add(name, 30, cause="turn")
    came.add(name, 9, cause="turn")
    came.set("segue_policy_version", 12)
    before, after = (
        {"rollout-0": exported(old), "rollout-2": exported(old)},
        {"rollout-0": exported(new), "rollout-1": exported(came)},
    )
    grew = difference(before, after)
    assert (total(grew, "rollout", name, cause="first"), total(grew, "rollout", name, cause="turn")) == (7, 39)
    assert set(grew) == {"rollout-0", "rollout-1"}
    assert not any(sample.startswith("segue_policy_version") for sample in grew["rollout-1"])


def test_names_of_samples_can_be_taken_apart_again() -> None:
    name = sample_name("segue_x_total", ("env", "class"), ("search_qa", "infra"))
    assert read_sample(name) == ("segue_x_total", {"env": "search_qa", "class": "infra"})
    assert read_sample(sample_name("segue_y", (), ())) == ("segue_y", {})


def test_what_is_no_exposition_is_refused() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        read_exposition("There are /metrics and /health here.")
