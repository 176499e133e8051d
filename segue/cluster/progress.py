"""How far a long preparation is, on stderr: bars in a terminal; elsewhere (a file, a batch job's output) a line now and then."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY_SECONDS = 20.0
"""Between two lines of a part: a few dozen for the longest warm start, and nobody has to ask whether it hangs."""


class Shown(Protocol):
    """What somebody who waits is shown. Parts come one after the other, in the order in which they were named."""

    def begin(self, part: str) -> None: ...

    def done(self, count: int, note: str = "") -> None:
        """So many of the part's total are done."""

    def say(self, line: str) -> None: ...


@contextlib.contextmanager
def shown(totals: Mapping[str, int], quiet: bool = False) -> Iterator[Shown]:
    """The parts by name, with what there is to do in each; their first begins by `begin` like the others."""
    console = Console(stderr=True)
    if quiet:
        yield Lines(totals, lambda line: None)
    elif sys.stderr.isatty() and not console.is_dumb_terminal:
        bars = Bars(totals, console)
        with bars.progress:
            yield bars
    else:
        yield Lines(totals)


class Bars:
    """One bar per part, all of them from the beginning."""

    def __init__(self, totals: Mapping[str, int], console: Console) -> None:
        self._console = console
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        width = max(map(len, totals))
        self._tasks = {
            part: self.progress.add_task(f"{part:<{width}}", total=total, note="", start=False) for part, total in totals.items()
        }
        self._now = next(iter(self._tasks.values()))

    def begin(self, part: str) -> None:
        self._now = self._tasks[part]
        self.progress.start_task(self._now)

    def done(self, count: int, note: str = "") -> None:
        self.progress.update(self._now, completed=count, note=note)

    def say(self, line: str) -> None:
        self._console.print(line)


def _to_stderr(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:  # nobody reads it any more, which is no reason to end; Python would try again at its end, and fail then
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


class Lines:
    """One line as a part begins, then one each `EVERY_SECONDS`: share done, note, seconds since the part began."""

    def __init__(
        self, totals: Mapping[str, int], write: Callable[[str], None] = _to_stderr, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._totals = totals
        self._write = write
        self._clock = clock
        self._part = ""
        self._began = self._said = 0.0

    def begin(self, part: str) -> None:
        self._part = part
        self._began = self._said = self._clock()
        self._write(f"{part}: 0 of {self._totals[part]}")

    def done(self, count: int, note: str = "") -> None:
        now = self._clock()
        if now - self._said < EVERY_SECONDS:
            return
        self._said = now
        total = self._totals[self._part]
        told = [
            f"{self._part}: {count} of {total} ({count / total:.0%})",
            *([note] if note else []),
            f"{now - self._began:.0f} s",
        ]
        self._write(", ".join(told))

    def say(self, line: str) -> None:
        self._write(line)
