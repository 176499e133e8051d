"""A training run as a user would start it, watched from outside: its console lines, and its `/metrics` at chosen steps.

consumes       the console of `segue train` (a child process), the targets in the run directory
produces       what every target exported when given steps ended; the run's files
waits for      the end of the child, at most `deadline` seconds; an answer of each target, at most `SCRAPE_SECONDS`
unblocked by   the child; the deadline, which stops it and raises
on cancel      the child is stopped, and with it everything it started
"""

from __future__ import annotations

import json
import math
import re
import sys
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import children
from segue.errors import RunFailed
from segue.metrics.registry import read_sample
from segue.report.facts import role_of
from segue.rundir import RunDir, read_jsonl

SCRAPE_SECONDS = 5.0
_STEP = re.compile(r"step\s+(\d+)/\d+\s")

Samples = Mapping[str, float]
"""One target's samples, by name and labels as in the exposition."""
Scrape = Mapping[str, Samples]
"""Samples by target name, for instance "rollout-0"."""


@dataclass(frozen=True)
class Watched:
    """A finished run: the lines of metrics.jsonl, summary.json, and `scrapes[n]`, taken when n steps were trained."""

    lines: list[dict[str, Any]]
    summary: dict[str, Any]
    scrapes: dict[int, Scrape]


def train(
    config: Path,
    run: Path,
    overrides: Sequence[str],
    marks: Collection[int],
    deadline: float,
    serial: bool = False,
    heard: Callable[[int, str], None] = lambda pid, line: None,
) -> Watched:
    """Run `segue train` to its end; `serial` in one process, which has nothing to scrape (no `marks` then).

    `heard(pid, line)` is called with the run's first process and each line it prints, before the targets are scraped.

    Raises `RunFailed` when it fails, is late, or ends before a mark was reached.
    """
    arguments = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, "-m", "segue.cli", "train", str(config), "--run", str(run), *arguments]
    command += ["--serial"] * serial
    scrapes: dict[int, Scrape] = {}

    def listen(pid: int, line: str) -> None:
        heard(pid, line)
        done = steps_done(line)
        if done in marks:
            try:
                scrapes[done] = scrape(run)
            except OSError as error:
                raise RunFailed("train", f"A target of the run in {run} did not answer after step {done}: {error}.") from error

    ended = children.run(command, deadline, listen)
    if ended.code != 0 or ended.late:
        words = "\n".join(ended.last)
        raise RunFailed(
            "train", f"{words}\nThe run in {run} {ended.why(deadline)}: its last lines are above, its logs in {run}/logs."
        )
    missing = sorted(set(marks) - set(scrapes))
    if missing:
        raise RunFailed("train", f"The run in {run} ended without a console line for step {missing[0]}.")
    folder = RunDir.open(run)
    return Watched(read_jsonl(folder.metrics), json.loads(folder.summary.read_text(encoding="utf-8")), scrapes)


def steps_done(line: str) -> int:
    """How many steps are trained according to a console line; 0 if it is not a step's."""
    found = _STEP.match(line)
    return int(found[1]) if found else 0


# --- what targets export ----------------------------------------------------------------------------------------------------


def scrape(run: Path) -> Scrape:
    """Ask every target of a run now. Raises `OSError` when one does not answer."""
    found: dict[str, Samples] = {}
    for file in sorted(RunDir.open(run).targets.glob("*.json")):
        for entry in json.loads(file.read_text(encoding="utf-8")):
            for address in entry["targets"]:
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=SCRAPE_SECONDS) as answer:
                    found[file.stem] = read_exposition(answer.read().decode())
    return found


def read_exposition(text: str) -> dict[str, float]:
    """The samples of Prometheus' text format."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    return samples


def grown(before: Scrape, after: Scrape, role: str, name: str, **labels: str) -> float:
    """By how much a counter (or a histogram's `_sum` or `_count`) grew between two scrapes, over all processes of a role."""
    return total(after, role, name, **labels) - total(before, role, name, **labels)


def total(scrape: Scrape, role: str, name: str, **labels: str) -> float:
    """A sample's sum over all processes of a role and over the labels left out."""
    value = 0.0
    for target, samples in scrape.items():
        if role_of(target) != role:
            continue
        for sample, number in samples.items():
            if sample.startswith(name):
                found, given = read_sample(sample)
                if found == name and labels.items() <= given.items():
                    value += number
    return value


def quantile(before: Scrape, after: Scrape, role: str, name: str, q: float) -> float | None:
    """A quantile of what a histogram observed between two scrapes, interpolated inside its bucket as PromQL does.

    None without an observation; the last finite edge where the quantile lies beyond it.
    """
    edges = sorted({float(edge) for edge in _edges(after, role, name)})
    counts = [grown(before, after, role, f"{name}_bucket", le=_text(edge)) for edge in edges]
    if not counts or counts[-1] <= 0:
        return None
    rank = q * counts[-1]
    below, start = 0.0, 0.0
    for edge, count in zip(edges, counts, strict=True):
        if count >= rank and count > below:
            return start if edge == math.inf else start + (edge - start) * (rank - below) / (count - below)
        below, start = count, edge
    raise AssertionError("the last bucket holds everything")


def _edges(scrape: Scrape, role: str, name: str) -> set[str]:
    found: set[str] = set()
    for target, samples in scrape.items():
        if role_of(target) == role:
            found |= {read_sample(sample)[1]["le"] for sample in samples if sample.startswith(f"{name}_bucket{{")}
    return found


def _text(edge: float) -> str:
    return "+Inf" if edge == math.inf else repr(edge)
