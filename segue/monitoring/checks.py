"""What is wrong with an expression by the catalogue: names, labels and label values that nobody exports.

A reading of PromQL's names only; whether it parses is Prometheus' matter (`promtool`, in the tests).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from segue.metrics.catalogue import CATALOGUE
from segue.metrics.metric import Metric
from segue.monitoring.prometheus import DCGM_COUNTERS
from segue.monitoring.rules import BY_NAME

TARGET_LABELS = ("run", "role", "rank", "node", "job", "instance")
OTHERS: Mapping[str, tuple[str, ...]] = {
    "up": (),
    "ALERTS": ("alertname", "alertstate", "severity"),
    **dict.fromkeys(DCGM_COUNTERS, ("UUID", "gpu", "Hostname")),
}
"""Metrics that others export and ours are read with, and their labels."""

_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)?\s*\{([^}]*)\}")
_MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*(?:,|$)')
_NAME = re.compile(r"(?<![\w:$])([a-zA-Z_:][\w:]*)(?!\s*\(|[\w:])")
_WORDS = {"and", "or", "unless", "offset", "bool", "by", "without", "on", "ignoring", "group_left", "group_right", "inf", "nan"}


def names_in(expr: str) -> list[str]:
    """The metrics and recording rules of an expression, in order, each once."""
    return list(dict.fromkeys(name for name, _ in _selectors(expr)))


def metrics_behind(expr: str) -> set[str]:
    """The catalogue's metrics that an expression reads, also through recording rules."""
    found: set[str] = set()
    for name in names_in(expr):
        if name in BY_NAME:
            found |= metrics_behind(BY_NAME[name].expr)
        elif metric := _metric(name):
            found.add(metric.name)
    return found


def problems(expr: str) -> list[str]:
    """One sentence for each thing that is not declared; empty if all is."""
    found: list[str] = []
    labels: set[str] = {*TARGET_LABELS, "le"}
    for name, matchers in _selectors(expr):
        own = _labels(name)
        if own is None:
            found.append(f"{name} is in no catalogue")
            continue
        labels |= set(own)
        for label, operator, value in _MATCHER.findall(matchers):
            if label not in own:
                found.append(f"{name} has no label {label}")
            elif (metric := _metric(name)) and not _matches(metric, label, operator, value):
                found.append(f"{name} has no {label}{operator}{value!r}")
        if _MATCHER.sub("", matchers).strip():
            found.append(f"{name}{{{matchers}}} is no list of matchers")
    for grouping in _GROUPING.findall(expr):
        wrong = [label for label in re.findall(r"\w+", grouping) if label not in labels]
        found += [f"nothing in it has the label {label}" for label in wrong]
    return found


def _selectors(expr: str) -> Iterator[tuple[str, str]]:
    rest = _GROUPING.sub(" ", expr)
    for name, matchers in _SELECTOR.findall(rest):
        yield name, matchers
    rest = _SELECTOR.sub(" ", rest)
    for name in _NAME.findall(re.sub(r"\[[^\]]*\]", " ", rest)):
        if name.lower() not in _WORDS:
            yield name, ""


def _metric(name: str) -> Metric | None:
    if name in CATALOGUE and CATALOGUE[name].kind != "histogram":
        return CATALOGUE[name]
    base, _, part = name.rpartition("_")
    metric = CATALOGUE.get(base)
    return metric if metric and metric.kind == "histogram" and part in ("bucket", "sum", "count") else None


def _labels(name: str) -> tuple[str, ...] | None:
    if name in BY_NAME:
        return BY_NAME[name].labels
    if name in OTHERS:
        return (*OTHERS[name], *TARGET_LABELS)
    metric = _metric(name)
    if metric is None:
        return None
    return (*metric.label_names, *TARGET_LABELS, *(("le",) if name.endswith("_bucket") else ()))


def _matches(metric: Metric, label: str, operator: str, value: str) -> bool:
    """Whether a value that is asked for (or excluded) is one that exists."""
    if label in TARGET_LABELS:
        return label != "role" or all(role in metric.roles for role in value.split("|"))
    declared = next((one for one in metric.labels if one.name == label), None)
    if declared is None or declared.values is None:
        return True
    values = {v for role in metric.roles for v in declared.values_for(role) or ()}
    if "~" not in operator:
        return value in values
    return all(any(re.fullmatch(part, v) for v in values) for part in value.split("|"))
