"""A training run as a user would start it, watched from outside: its console lines, and its `/metrics` at chosen steps.

consumes       the console of `segue train` (a child process), the targets in the run directory
produces       what every target exported when given steps ended; the run's files
waits for      the end of the child, at most `deadline` seconds; each target's answer (`segue.metrics.scrape`)
unblocked by   the child; the deadline, which stops it and raises
on cancel      the child is stopped, and with it everything it started
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import children
from segue.errors import RunFailed
from segue.files import read_jsonl
from segue.metrics.samples import Scrape
from segue.metrics.scrape import scrape
from segue.rundir import RunDir

STOPPED = 128 + signal.SIGTERM
_STEP = re.compile(r"step\s+(\d+)/\d+\s")


@dataclass(frozen=True)
class Watched:
    """A finished run: the lines of metrics.jsonl, summary.json (of one that was stopped: nothing), and `scrapes[n]`, taken when n
    steps were trained."""

    lines: list[dict[str, Any]]
    summary: dict[str, Any]
    scrapes: dict[int, Scrape]


@contextlib.contextmanager
def scratch(name: str, keep: Path | None = None) -> Iterator[Path]:
    """A folder for runs: `keep`, or a new one that goes afterwards; not where a run failed, whose sentence names its logs."""
    if keep is not None:
        yield keep
        return
    folder = Path(tempfile.mkdtemp(prefix=f"segue-{name}-"))
    try:
        yield folder
    except RunFailed:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def train(
    config: Path,
    run: Path,
    overrides: Sequence[str],
    marks: Collection[int],
    deadline: float,
    serial: bool = False,
    heard: Callable[[int, str], None] = lambda pid, line: None,
    until: int | None = None,
) -> Watched:
    """Run `segue train` to its end; `serial` in one process, which has nothing to scrape (no `marks` then).

    `until` so many steps are trained, where not all are to be: then it is told to stop, in order.
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
        if done and done == until:
            os.kill(pid, signal.SIGTERM)  # SIGINT is ignored in what a shell runs in the background

    ended = children.run(command, deadline, listen)
    if ended.code not in (0, *([STOPPED] if until is not None else [])) or ended.late:
        words = "\n".join(ended.last)
        raise RunFailed(
            "train", f"{words}\nThe run in {run} {ended.why(deadline)}: its last lines are above, its logs in {run}/logs."
        )
    missing = sorted(set(marks) - set(scrapes))
    if missing:
        raise RunFailed("train", f"The run in {run} ended without a console line for step {missing[0]}.")
    folder = RunDir.open(run)
    summary = json.loads(folder.summary.read_text(encoding="utf-8")) if folder.summary.exists() else {}
    return Watched(read_jsonl(folder.metrics), summary, scrapes)


def steps_done(line: str) -> int:
    """How many steps are trained according to a console line; 0 if it is not a step's."""
    found = _STEP.match(line)
    return int(found[1]) if found else 0
