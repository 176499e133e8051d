"""The registry of one process: holds the values of the catalogue's metrics and hands them to Prometheus and to summaries.

Values live in plain dicts under one lock and are turned into Prometheus families when somebody asks (`collect`), because the
Python client cannot observe a value n times in one call, and because every declared label combination must exist as 0
from the start: a missing series silently disables ratios and alerts.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from segue import __version__
from segue.metrics.catalogue import CATALOGUE, exported_by
from segue.metrics.metric import Metric
from segue.metrics.samples import sample_name
from segue.metrics.series import Counter, Gauge, Histogram, Key, Observed, Writes
from segue.metrics.states import Clock

_STATE_SECONDS = "segue_worker_state_seconds_total"
_ELAPSED = "segue_worker_elapsed_seconds_total"
_STATE = "segue_worker_state"
_WRITES = "segue_metric_writes_total"
_NOWHERE: tuple[tuple[str, ...], dict[Key, float]] = ((), {})


Reading = tuple[str, dict[str, str], float]
"""What a reader found: a metric, its labels, its value (of a counter: in all so far)."""


class UndeclaredMetric(LookupError):
    """A metric, label or label value that the catalogue does not declare for this role: a mistake of ours."""


@dataclass(frozen=True)
class BuildInfo:
    """What is running: the package's version, the commit if known, and the attempt (1, and more after each resume)."""

    version: str = __version__
    git_sha: str = "unknown"
    attempt: int = 1


class Metrics(Collector):
    """The metrics of one role in one process. Only names, labels and values of the catalogue are accepted.

    `envs` are the values of the `env` label, `gpus` the UUIDs this process owns. `staleness_bound` (versions) becomes a
    bucket edge, with 0.8 of it, because an alert fires there. `monotonic` is what state clocks are held against. Safe to use from
    several threads.
    """

    def __init__(
        self,
        role: str,
        rank: str = "0",
        *,
        envs: Sequence[str] = (),
        gpus: Sequence[str] = (),
        build: BuildInfo = BuildInfo(),
        staleness_bound: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.role = role
        self.rank = rank
        self.gpus = tuple(gpus)
        self._writes = Writes()
        self._lock = self._writes.lock
        self._declared = {metric.name: metric for metric in exported_by(role)}
        self._open = {
            "env": tuple(envs),
            "UUID": self.gpus,
            "version": (build.version,),
            "git_sha": (build.git_sha,),
            "attempt": (str(build.attempt),),
        }
        self._values: dict[str, dict[Key, float]] = {}
        self._histograms: dict[str, dict[Key, Observed]] = {}
        for metric in self._declared.values():
            every = itertools.product(*(self._label_values(metric, name) for name in metric.label_names))
            keys = [] if metric.read else [*every]
            if metric.kind == "histogram":
                edges = metric.buckets
                if metric.unit == "versions" and staleness_bound is not None:
                    edges = tuple(sorted({*edges, float(staleness_bound), round(0.8 * staleness_bound, 6)}))
                self._histograms[metric.name] = {key: Observed(edges) for key in keys}
            else:
                always = 1.0 if metric.name.endswith("_info") else 0.0
                self._values[metric.name] = dict.fromkeys(keys, always)
        self._quick: dict[tuple[str, str], tuple[tuple[str, ...], dict[Key, float]]] = {
            (name, metric.kind): (metric.label_names, self._values[name])
            for name, metric in self._declared.items()
            if metric.kind != "histogram"
        }
        if staleness_bound is not None and "segue_staleness_bound_versions" in self._declared:
            self._values["segue_staleness_bound_versions"][()] = float(staleness_bound)
        self._clock: Clock | None = None
        self._monotonic = monotonic
        self._began = 0.0
        self._readers: list[Callable[[], Iterable[Reading]]] = []
        self.registry = CollectorRegistry()
        self.registry.register(self)

    # --- writing ----------------------------------------------------------------------------------------------------

    def counter(self, name: str, **labels: str) -> Counter:
        """A series to count on often: spares finding it each time."""
        return Counter(name, *self._series(name, "counter", labels), self._writes)

    def gauge(self, name: str, **labels: str) -> Gauge:
        """A series to set often."""
        return Gauge(*self._series(name, "gauge", labels), self._writes)

    def histogram(self, name: str, **labels: str) -> Histogram:
        """A series to observe often."""
        return Histogram(name, self._histogram(name, labels), self._writes)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Count `value` more. Raises ValueError if it is negative or not a number."""
        if not value >= 0.0 or value == math.inf:
            raise ValueError(f"{name} is a counter: it cannot grow by {value}")
        series, key = self._series(name, "counter", labels)
        with self._lock:
            series[key] += value
            self._writes.count += 1

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        series, key = self._series(name, "gauge", labels)
        with self._lock:
            series[key] = float(value)
            self._writes.count += 1

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Observe one value of a histogram. Raises ValueError on NaN and infinity."""
        if not math.isfinite(value):
            raise ValueError(f"{name}: an observation of {value}")
        histogram = self._histogram(name, labels)
        with self._lock:
            histogram.observe(float(value), 1)
            self._writes.count += 1

    def observe_counts(self, name: str, values: Sequence[float], counts: Sequence[int], **labels: str) -> None:
        """Observe `values[i]` `counts[i]` times, all at once. Raises ValueError on NaN, infinity or a negative count."""
        if len(values) != len(counts):
            raise ValueError(f"{name}: {len(values)} values and {len(counts)} counts")
        pairs = [(float(value), int(count)) for value, count in zip(values, counts, strict=True)]
        for value, count in pairs:
            if not math.isfinite(value) or count < 0:
                raise ValueError(f"{name}: {count} observations of {value}")
        histogram = self._histogram(name, labels)
        with self._lock:
            for value, count in pairs:
                histogram.observe(value, count)
            self._writes.count += len(pairs)

    def attach(self, clock: Clock) -> None:
        """Export a clock's seconds as this process's states; it is started anew. Its states must be those of the role."""
        declared = {key[0] for key in self._values[_STATE_SECONDS]}
        if set(clock.current()) != declared:
            raise UndeclaredMetric(f"a clock of {sorted(clock.current())} for {self.role}, whose states are {sorted(declared)}")
        with self._lock:
            self._clock = clock
            clock.restart()
            self._began = self._monotonic()

    def attach_reader(self, reader: Callable[[], Iterable[Reading]]) -> None:
        """Ask `reader` for its values whenever somebody asks for them here: they cost nothing in between.

        Only for `read` metrics of the catalogue. A scrape waits for it, in a thread of its own.
        """
        self._readers.append(reader)

    @property
    def clock(self) -> Clock | None:
        """The attached state clock."""
        return self._clock

    # --- reading ----------------------------------------------------------------------------------------------------

    def value(self, name: str, **labels: str) -> float:
        """A counter's or gauge's value, or how often a histogram was observed; summed over the labels left out."""
        self._check_partial(name, labels)
        return sum(value for _, value in self._matching(name, labels))

    def sum(self, name: str, **labels: str) -> float:
        """The sum of everything a histogram observed; summed over the labels left out."""
        self._check_partial(name, labels)
        names = self._metric(name, "histogram").label_names
        with self._lock:
            return sum(h.sum for key, h in self._histograms[name].items() if _matches(names, key, labels))

    def snapshot(self, names: Collection[str] = ()) -> dict[str, float]:
        """Every sample as plain data, named as in the exposition: `segue_prefill_tokens_total{cause="first"}` → 12.0.

        With `names`, those of these metrics alone, as far as this role exports them; no reader is asked then.

        Histograms appear as `…_bucket{…,le="4.0"}`, `…_count` and `…_sum`. `read_sample` takes the names apart again.
        """
        self._refresh(readers=not names)
        samples: dict[str, float] = {}
        with self._lock:
            for metric in (metric for metric in self._declared.values() if not names or metric.name in names):
                for key, value in self._values.get(metric.name, {}).items():
                    samples[sample_name(metric.name, metric.label_names, key)] = value
                for key, histogram in self._histograms.get(metric.name, {}).items():
                    buckets = histogram.cumulative()
                    for edge, count in buckets:
                        samples[sample_name(f"{metric.name}_bucket", (*metric.label_names, "le"), (*key, edge))] = count
                    samples[sample_name(f"{metric.name}_count", metric.label_names, key)] = buckets[-1][1]
                    samples[sample_name(f"{metric.name}_sum", metric.label_names, key)] = histogram.sum
        return samples

    def collect(self) -> Iterable[Family]:
        """The families of one scrape."""
        self._refresh()
        with self._lock:
            return [self._family(m) for m in self._declared.values() if not (m.read and not self._values[m.name])]

    def describe(self) -> Iterable[Family]:
        """Nothing: lets the collector register without being asked for values first."""
        return []

    # --- inside -----------------------------------------------------------------------------------------------------

    def _label_values(self, metric: Metric, name: str) -> tuple[str, ...]:
        label = next(label for label in metric.labels if label.name == name)
        closed = label.values_for(self.role)
        return self._open[name] if closed is None else closed

    def _metric(self, name: str, kind: str) -> Metric:
        metric = self._declared.get(name)
        if metric is None:
            where = "the catalogue has no such metric" if name not in CATALOGUE else f"{self.role} does not export it"
            raise UndeclaredMetric(f"{name}: {where}")
        if metric.kind != kind:
            raise UndeclaredMetric(f"{name} is a {metric.kind}, not a {kind}")
        return metric

    def _key(self, metric: Metric, labels: dict[str, str]) -> Key:
        try:
            key = tuple([labels[name] for name in metric.label_names])
        except KeyError as error:
            raise UndeclaredMetric(f"{metric.name} needs the label {error}") from None
        if len(labels) != len(key):
            extra = sorted(set(labels) - set(metric.label_names))
            raise UndeclaredMetric(f"{metric.name} has no label {', '.join(extra)}")
        return key

    def _series(self, name: str, kind: str, labels: dict[str, str]) -> tuple[dict[Key, float], Key]:
        names, series = self._quick.get((name, kind), _NOWHERE)
        if len(labels) == len(names):
            key = tuple([labels.get(label, "") for label in names])
            if key in series:
                return series, key
        metric = self._metric(name, kind)
        self._key(metric, labels)
        raise self._undeclared_value(metric, labels)

    def _histogram(self, name: str, labels: dict[str, str]) -> Observed:
        metric = self._metric(name, "histogram")
        histogram = self._histograms[name].get(self._key(metric, labels))
        if histogram is None:
            raise self._undeclared_value(metric, labels)
        return histogram

    def _undeclared_value(self, metric: Metric, labels: dict[str, str]) -> UndeclaredMetric:
        wrong = [f"{k}={v!r}" for k, v in labels.items() if v not in self._label_values(metric, k)]
        return UndeclaredMetric(f"{metric.name} of {self.role} does not declare {', '.join(wrong)}")

    def _check_partial(self, name: str, labels: dict[str, str]) -> None:
        metric = self._declared.get(name)
        if metric is None:
            raise UndeclaredMetric(f"{name}: {self.role} does not export it")
        for label, value in labels.items():
            if label not in metric.label_names or value not in self._label_values(metric, label):
                raise UndeclaredMetric(f"{name} of {self.role} does not declare {label}={value!r}")

    def _matching(self, name: str, labels: dict[str, str]) -> list[tuple[Key, float]]:
        names = self._declared[name].label_names
        self._refresh()
        with self._lock:
            found = [*self._values.get(name, {}).items()]
            found += [(key, float(sum(h.counts))) for key, h in self._histograms.get(name, {}).items()]
        return [(key, value) for key, value in found if _matches(names, key, labels)]

    def _refresh(self, readers: bool = True) -> None:
        """Bring up to date what is read and not written."""
        self._read_clock()
        for name, labels, value in [reading for reader in self._readers * readers for reading in reader()]:
            metric = self._declared.get(name)
            if metric is None or not metric.read:
                raise UndeclaredMetric(f"{name}: a reader brought it to {self.role}, for which it is not declared as read")
            key = self._key(metric, labels)
            if any(value not in self._label_values(metric, label) for label, value in labels.items()):
                raise self._undeclared_value(metric, labels)
            with self._lock:
                series = self._values[name]
                series[key] = max(series.get(key, 0.0), value) if metric.kind == "counter" else value
        changes = self._clock.changes() if self._clock else 0
        with self._lock:
            self._values[_WRITES][()] = float(self._writes.count + changes)

    def _read_clock(self) -> None:
        if self._clock is None:
            return
        with self._lock:  # around the reading: of two scrapes at once, the later one must not write what the earlier one read
            seconds, elapsed, current = self._clock.seconds(), self._monotonic() - self._began, self._clock.current()
            self._values[_ELAPSED][()] = elapsed
            for state, spent in seconds.items():
                self._values[_STATE_SECONDS][(state,)] = spent
                self._values[_STATE][(state,)] = float(current[state])

    def _family(self, metric: Metric) -> Family:
        names = metric.label_names
        if metric.kind == "histogram":
            histograms = HistogramMetricFamily(metric.name, metric.help, labels=names)
            for key, histogram in self._histograms[metric.name].items():
                histograms.add_metric(key, histogram.cumulative(), histogram.sum)
            return histograms
        family: CounterMetricFamily | GaugeMetricFamily
        if metric.kind == "counter":
            family = CounterMetricFamily(metric.name, metric.help, labels=names)
        else:
            family = GaugeMetricFamily(metric.name, metric.help, labels=names)
        for key, value in self._values[metric.name].items():
            family.add_metric(key, value)
        return family


def _matches(names: Sequence[str], key: Key, labels: dict[str, str]) -> bool:
    return all(labels.get(name, value) == value for name, value in zip(names, key, strict=True))
