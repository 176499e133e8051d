"""What a declaration in the catalogue is: a metric, its labels and their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Values = tuple[str, ...] | Mapping[str, tuple[str, ...]] | None


@dataclass(frozen=True)
class Label:
    """A label and its values: a closed set, one closed set per role, or None: given once when the process starts."""

    name: str
    values: Values

    def values_for(self, role: str) -> tuple[str, ...] | None:
        """The closed set of `role`; None for values given at start."""
        return self.values.get(role, ()) if isinstance(self.values, Mapping) else self.values


@dataclass(frozen=True)
class Metric:
    """One metric: `unit` is "" for plain ratios of counts and for numbers of things named by the metric itself.

    `read` ones have no series before somebody attaches what reads them (`Metrics.attach_reader`): 0 would be a lie.
    """

    name: str
    kind: Kind
    unit: str
    roles: tuple[str, ...]
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    read: bool = False

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)


def counter(name: str, unit: str, roles: tuple[str, ...], help: str, *labels: Label) -> Metric:
    """A metric that only grows."""
    return Metric(name, "counter", unit, roles, help, labels)


def gauge(name: str, unit: str, roles: tuple[str, ...], help: str, *labels: Label) -> Metric:
    """A metric that goes up and down."""
    return Metric(name, "gauge", unit, roles, help, labels)


def read(name: str, kind: Kind, unit: str, roles: tuple[str, ...], help: str, *labels: Label) -> Metric:
    """A metric that has no series before somebody attaches what reads it."""
    return Metric(name, kind, unit, roles, help, labels, read=True)


def histogram(name: str, unit: str, roles: tuple[str, ...], buckets: tuple[float, ...], help: str, *labels: Label) -> Metric:
    """Observations by bucket."""
    return Metric(name, "histogram", unit, roles, help, labels, buckets)
