"""What the processes of a run exported, as plain numbers: named, read back from text, summed over a role, compared in time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

Samples = Mapping[str, float]
"""One target's samples, by name and labels as in the exposition."""
Scrape = Mapping[str, Samples]
"""Samples by target name, for instance "rollout-0"."""

_PAIR = re.compile(r'(\w+)="([^"]*)"')
_GROWING = ("_total", "_bucket", "_count", "_sum")


def sample_name(name: str, labels: Sequence[str], values: Sequence[str]) -> str:
    """A sample's name with its labels in braces, in the order of declaration."""
    pairs = [f'{label}="{value}"' for label, value in zip(labels, values, strict=True)]
    return f"{name}{{{','.join(pairs)}}}" if pairs else name


def read_sample(sample: str) -> tuple[str, dict[str, str]]:
    """The inverse of `sample_name`: the name and the labels. Label values hold no quotes (they come from closed sets)."""
    name, brace, rest = sample.partition("{")
    return name, dict(_PAIR.findall(rest)) if brace else {}


def read_exposition(text: str) -> dict[str, float]:
    """The samples of Prometheus' text format. Raises `ValueError` where it is something else."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    return samples


def role_of(target: str) -> str:
    """The role in a target's name: "weightsync-rollout-0" is weightsync's."""
    return target.partition("-")[0]


def values(scrape: Scrape, role: str, name: str, **labels: str) -> Iterator[float]:
    """A metric's samples of all processes of a role, whatever the labels left out are."""
    for target, samples in scrape.items():
        if role_of(target) != role:
            continue
        for sample, number in samples.items():
            if sample.startswith(name):
                found, given = read_sample(sample)
                if found == name and labels.items() <= given.items():
                    yield number


def total(scrape: Scrape, role: str, name: str, **labels: str) -> float:
    """The sum of `values`."""
    return sum(values(scrape, role, name, **labels))


def grown(before: Scrape, after: Scrape, role: str, name: str, **labels: str) -> float:
    """By how much a counter (or a histogram's `_sum` or `_count`) grew between two scrapes, over all processes of a role."""
    return total(after, role, name, **labels) - total(before, role, name, **labels)


def difference(before: Scrape, after: Scrape) -> dict[str, dict[str, float]]:
    """By how much every counter and histogram grew, for each target of `after`.

    A process that came in between counts from 0; so does one that began anew, which shows because something of it fell.
    """
    grew: dict[str, dict[str, float]] = {}
    for target, samples in after.items():
        counted = {sample: value for sample, value in samples.items() if sample.partition("{")[0].endswith(_GROWING)}
        known = before.get(target, {})
        if any(value < known.get(sample, 0.0) for sample, value in counted.items()):
            known = {}
        grew[target] = {sample: value - known.get(sample, 0.0) for sample, value in counted.items()}
    return grew


def quantile(grew: Scrape, role: str, name: str, q: float) -> float | None:
    """A quantile of what a role's histograms observed, interpolated inside its bucket as PromQL does; `grew`: see `difference`.

    None without an observation; the last finite edge where the quantile lies beyond it.
    """
    counts: dict[float, float] = {}
    for target, samples in grew.items():
        if role_of(target) == role:
            for sample, count in samples.items():
                if sample.startswith(f"{name}_bucket{{"):
                    edge = float(read_sample(sample)[1]["le"])
                    counts[edge] = counts.get(edge, 0.0) + count
    edges = sorted(counts)
    if not edges or counts[edges[-1]] <= 0:
        return None
    rank = q * counts[edges[-1]]
    below, start = 0.0, 0.0
    for edge in edges:
        count = counts[edge]
        if count >= rank and count > below:
            return start if edge == math.inf else start + (edge - start) * (rank - below) / (count - below)
        below, start = count, edge
    raise AssertionError("the last bucket holds everything")
