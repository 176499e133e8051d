"""`segue top RUN`: looks at a run again and again and draws what it sees, until the run is over or Ctrl-C.

Consumes: `/metrics` of the run's processes, its metrics.jsonl and summary.json, and Prometheus' alerts where one watches the run.
Waits for: the run directory up to `APPEAR_SECONDS`; every answer up to `ASK_SECONDS`; the interval between two looks.
Unblocked by: Ctrl-C at any moment.
Produces: pictures.
"""

from __future__ import annotations

import io
import time
from collections import deque
from pathlib import Path
from time import sleep
from typing import IO, Any

from rich.console import Console, Group
from rich.live import Live

from segue.config import load_config
from segue.console import written_to
from segue.errors import RunFailed
from segue.metrics.scrape import Scraper
from segue.monitoring.firing import alerts_of
from segue.report.read import age_bound, condition_of, read_summary
from segue.report.steps import read_steps
from segue.rundir import CONFIG, LOCK, RunDir
from segue.top.draw import draw
from segue.top.model import Look, live, past
from segue.top.steps_seen import StepsSeen

ASK_SECONDS = 2.0
WINDOW_SECONDS = 10.0
"""Shares and rates are over the looks of so long, or over two looks if they are further apart."""
APPEAR_SECONDS = 10.0
"""How long a live picture waits for a run that is only being started."""
WIDTH = 240
"""Columns where there is no terminal: no figure is torn apart."""


def top(path: Path, interval: float, once: bool, out: IO[str]) -> int:
    """Show the run in `path`; 0. With `once`, or where `out` is no terminal, one picture. Raises `UserError` if there is none."""
    alone = once or not out.isatty()
    try:
        if not alone:
            _await(path, out)
        watch = Watch(RunDir.open(path))
        if alone:
            watch.look()
            if watch.goes_on:
                sleep(interval)
                watch.look()
        else:
            with Live(console=Console(file=out), screen=True, auto_refresh=False) as screen:
                while watch.look():
                    screen.update(watch.picture(), refresh=True)
                    sleep(interval)
        picture = watch.picture()
        with written_to(out):
            _print(picture, out)
    except KeyboardInterrupt:
        pass
    return 0


def _await(path: Path, out: IO[str]) -> None:
    """Wait until the run directory is there, or `APPEAR_SECONDS`. A folder with other things in it will not become one."""
    deadline = time.monotonic() + APPEAR_SECONDS
    told = False
    while not (path / CONFIG).is_file() and time.monotonic() < deadline:
        if path.exists() and not (path / LOCK).exists():
            return
        if not told:
            print(f"There is no run directory {path} yet: waiting up to {APPEAR_SECONDS:g} s for it.", file=out, flush=True)
            told = True
        sleep(0.2)


def _print(picture: Group, out: IO[str]) -> None:
    if out.isatty():
        Console(file=out).print(picture)
        return
    plain = Console(file=io.StringIO(), width=WIDTH, no_color=True)
    with plain.capture() as lines:
        plain.print(picture)
    print("\n".join(line.rstrip() for line in lines.get().splitlines()), file=out, flush=True)


class Watch:
    """One run under watch: the newest looks at it, and how it stands."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._config = load_config(run.config)
        self._bound = age_bound(run, self._config)
        self._scraper = Scraper(run, ASK_SECONDS)
        self._steps = StepsSeen(run.metrics)
        self._looks: deque[Look] = deque()
        self.goes_on = True

    def look(self) -> bool:
        """Look once more. False: nothing that goes on was seen. Raises `RunFailed` if the run directory is there no more."""
        samples, silent = self._scraper.ask()
        self._steps.read()
        look = Look(time.monotonic(), time.time(), samples, silent, self._scraper.hosts, self._steps.newest, self._steps.ages)
        while len(self._looks) > 1 and look.moment - self._looks[1].moment >= WINDOW_SECONDS:
            self._looks.popleft()
        self._looks.append(look)
        self.goes_on = bool(samples) or self._run.held()
        if not self.goes_on and not self._run.config.is_file():
            path = self._run.path
            raise RunFailed("run", f"The run directory {path} is gone: deleted or moved while it was watched; name another.")
        return self.goes_on

    def picture(self) -> Group:
        """What was seen, drawn."""
        look = self._looks[-1]
        trained = 0 if look.line is None else int(look.line["step"]) + 1
        sentence = condition_of(self._run, self._config, trained, self.goes_on).sentence
        alerts = alerts_of(self._run) if self.goes_on else None
        if look.samples or (self.goes_on and look.silent):
            before = self._looks[0] if len(self._looks) > 1 else None
            seen = live(before, look, self._bound)
        else:
            lines = read_steps(self._run.metrics)
            seen = past(lines, self._summary(), self._bound)
            if self.goes_on:
                sentence += self._silence(bool(lines))
            elif look.silent:
                sentence += f" Processes that ended without a word: {', '.join(look.silent)}."
        return draw(f"Run {self._run.name}", sentence, seen, alerts, self._config.steps, look.wall)

    def _silence(self, trains: bool) -> str:
        """Why a run that goes on shows no process."""
        serial = (self._run.logs / "serial-0.log").exists()
        if serial:
            return " In one process (--serial), which exports nothing: these are the figures of its steps."
        if not self._run.log_of("driver-0", self._run.attempts()).exists():
            return " It prepares: makes its warm start, say, which its own output shows."
        return " Its processes start: none answers yet." if not trains else " No process answers: it starts or stops."

    def _summary(self) -> dict[str, Any] | None:
        return read_summary(self._run) if self._run.summary.is_file() else None
