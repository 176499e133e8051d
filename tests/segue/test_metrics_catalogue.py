"""The catalogue keeps the conventions of docs/metrics.md, and a scrape of every role passes a linter's checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from segue.episode import DropReason, FailureClass, Outcome, State
from segue.metrics import Metrics
from segue.metrics.catalogue import CATALOGUE, exported_by
from segue.metrics.metric import Metric
from segue.metrics.vocabulary import (
    DROP_REASONS,
    EPISODE_STATES,
    FAILURE_CLASSES,
    OTHER,
    OUTCOMES,
    ROLES,
    ROLLOUT_PRECEDENCE,
    STATES,
    is_idle,
)

BASE_UNITS = ("seconds", "bytes", "ratio", "nats", "versions", "tokens")


def metrics_of(role: str) -> Metrics:
    return Metrics(role, envs=("search_qa", "latency"), gpus=("GPU-1",), staleness_bound=4)


@pytest.mark.parametrize("metric", CATALOGUE.values(), ids=lambda m: m.name)
def test_names_and_labels_keep_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"segue_[a-zA-Z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not metric.name.endswith(("_sum", "_count", "_bucket", "_created"))
    assert set(metric.roles) <= set(ROLES) and metric.roles
    assert metric.help[0].isupper() and metric.help.endswith(".") and "\n" not in metric.help
    last_word = metric.name.removesuffix("_total").rsplit("_", 1)[-1]
    if last_word in BASE_UNITS or metric.unit in BASE_UNITS:
        assert metric.unit == last_word or metric.name == "segue_policy_version"
    assert (metric.buckets != ()) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    for label in metric.labels:
        for role in metric.roles:
            values = label.values_for(role)
            if values is not None:
                assert 0 < len(values) <= 10, f"{label.name}: {len(values)} values"
                assert len(set(values)) == len(values)


def test_every_metric_of_the_catalogue_is_set_somewhere() -> None:
    """A row that nobody sets reads as a thing that never happens. Those who only read do not count."""
    root = Path(__file__).resolve().parents[2]
    rooms = ("scheduler", "envpool", "rollout", "learner", "weightsync", "segue")
    readers = [root / "segue" / name for name in ("metrics/catalogue.py", "monitoring", "top", "report")]
    sources = [path for room in rooms for path in (root / room).rglob("*.py") if not any(map(path.is_relative_to, readers))]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    own = {"segue_build_info", "segue_gpu_assignment_info"}  # what every registry sets of itself, when it is made
    assert [name for name in CATALOGUE if name not in own and f'"{name}"' not in text] == []


def test_no_metric_names_an_environment_or_an_identity() -> None:
    for metric in CATALOGUE.values():
        assert not {"episode", "request", "prompt", "pid", "step"} & set(metric.label_names)


def test_the_closed_sets_are_those_of_the_episode_module() -> None:
    assert set(EPISODE_STATES) == {str(s) for s in State}
    assert set(OUTCOMES) == {str(o) for o in Outcome}
    assert set(DROP_REASONS) == {str(r) for r in DropReason}
    assert set(FAILURE_CLASSES) == {str(c) for c in FailureClass}


def test_every_role_has_states_and_only_wait_states_are_idle() -> None:
    assert set(STATES) == set(ROLES)
    for role, states in STATES.items():
        assert states[-1] == OTHER
        assert any(is_idle(state) for state in states), role
        assert any(not is_idle(state) and state != OTHER for state in states), role
    assert (*ROLLOUT_PRECEDENCE, OTHER) == STATES["rollout"]


def test_alert_limits_are_bucket_edges() -> None:
    assert 120.0 in CATALOGUE["segue_weight_sync_seconds"].buckets
    samples = metrics_of("learner").snapshot()
    assert {'segue_token_staleness_versions_bucket{le="4.0"}', 'segue_token_staleness_versions_bucket{le="3.2"}'} <= set(samples)


@pytest.mark.parametrize("role", ROLES)
def test_a_fresh_scrape_has_every_declared_series_and_passes_the_lint(role: str) -> None:
    metrics = metrics_of(role)
    text = generate_latest(metrics.registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for metric in (metric for metric in exported_by(role) if not metric.read):
        family = families.pop(metric.name.removesuffix("_total"))
        assert family.documentation == metric.help and family.type == metric.kind
        expected = 1
        for label in metric.labels:
            values = label.values_for(role)
            expected *= {"env": 2}.get(label.name, 1) if values is None else len(values)
        assert len(_series(family)) == expected > 0, metric.name
        lint(family)
        always = 1.0 if metric.name.endswith("_info") else 4.0 if metric.name == "segue_staleness_bound_versions" else 0.0
        assert {sample.value for sample in family.samples} == {always}
    assert not families, f"undeclared: {sorted(families)}"
    assert "_created" not in text


@pytest.mark.parametrize("role", ROLES)
def test_the_openmetrics_exposition_parses_too(role: str) -> None:
    text = generate_openmetrics(metrics_of(role).registry).decode()  # type: ignore[no-untyped-call]
    names = {family.name for family in parse_openmetrics(text)}  # type: ignore[no-untyped-call]
    assert names == {metric.name.removesuffix("_total") for metric in exported_by(role) if not metric.read}


def _series(family: Family) -> set[tuple[tuple[str, str], ...]]:
    return {tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le")) for sample in family.samples}


def lint(family: Family) -> None:
    """What `promtool check metrics` complains about."""
    assert family.documentation
    units = ("seconds", "bytes")
    for abbreviation in ("_ms", "_sec", "_milliseconds", "_minutes", "_kb", "_mb", "_percent"):
        assert not family.name.endswith(abbreviation)
    for unit in units:
        if unit in family.name.split("_"):
            assert family.name.endswith(unit) or family.name.endswith(f"{unit}_total")
    assert family.type not in family.name.split("_")
    if family.type != "counter":
        assert not family.name.endswith("_total")
    assert all(not re.search("[A-Z]", label) or label == "UUID" for sample in family.samples for label in sample.labels)
