"""The supervised process's side of `segue.cluster.supervisor`: what it is to do, its report pipe, its end with its parent."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.cluster.processes import end_with_parent
from segue.cluster.roles import failure_of
from segue.config import Config, load_config
from segue.console import END_SECONDS, Console
from segue.logs import ProcessLog
from segue.rundir import RunDir

REPORT_FD, SUPERVISOR, SCRATCH = "SEGUE_REPORT_FD", "SEGUE_SUPERVISOR", "SEGUE_SCRATCH"

log = logging.getLogger(__name__)


class Report:
    """The driver's end of the pipe to its supervisor; without a supervisor (a test, a debugger) it says nothing."""

    def __init__(self) -> None:
        fd = os.environ.pop(REPORT_FD, None)
        self._fd = int(fd) if fd else None
        if self._fd is not None:
            os.set_inheritable(self._fd, False)

    def process(self, pid: int, part: str, fatal: bool) -> None:
        """`pid` belongs to the run; if `fatal`, the run cannot go on without it."""
        self._send({"pid": pid, "part": part, "fatal": fatal})

    def ray(self, address: str) -> None:
        """Ray runs, and the other hosts can join it at `address`."""
        self._send({"ray": address})

    def alive(self) -> None:
        """From now on one of these every so often: a process that is stopped or stuck sends none."""
        self._send({"alive": True})

    def started(self) -> None:
        """From now on an interrupt finds something that is worth to be stopped in order."""
        self._send({"started": True})

    def stopping(self) -> None:
        """From now on processes end because they are meant to."""
        self._send({"stopping": True})

    def result(self, code: int, part: str = "", sentence: str = "") -> None:
        """The exit code, and what to print if the run failed; nothing that goes wrong afterwards changes it."""
        self._send({"result": {"exit": code, "part": part, "sentence": sentence}})

    def _send(self, report: dict[str, Any]) -> None:
        if self._fd is not None:
            os.write(self._fd, json.dumps(report).encode() + b"\n")


@dataclass(frozen=True)
class Job:
    """What the process is to run.

    `resume` is a checkpoint folder or ""; `console` is what the user sees; `scratch` is for files that need not last.
    """

    run: RunDir
    config: Config
    model: str
    attempt: int
    resume: str
    only_eval: bool
    report: Report
    console: Console
    scratch: Path


def command_line(run: RunDir, model: str, attempt: int, resume: str, only_eval: bool) -> list[str]:
    """The arguments that `run_job` reads."""
    line = [str(run.path), model, str(attempt)]
    return [*line, *(["--resume", resume] if resume else []), *(["--only-eval"] if only_eval else [])]


def tell_failure(error: Exception, process: str, report: Report) -> int:
    """Log and report why the run failed; returns the exit code. Whoever has something to stop does this first: where the stop
    hangs, the supervisor kills the process, and the cause would go with it."""
    failure = failure_of(error, process)
    log.error("the run failed", exc_info=error)
    code = 2 if failure.fault == "user" else 1
    report.result(code, failure.error, failure.sentence)
    return code


def run_job(process: str, work: Callable[[Job], int]) -> int:
    """Do `work`, which reports its result, as the process `process`; report its failure; return the exit code.

    It ends with its supervisor, which also hears SIGTERM for it: see to it before this that it has no effect here.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("model")
    parser.add_argument("attempt", type=int)
    parser.add_argument("--resume", default="")
    parser.add_argument("--only-eval", action="store_true")
    told = parser.parse_args()
    scratch = Path(os.environ.get(SCRATCH) or tempfile.mkdtemp(prefix="segue-"))
    if supervisor := os.environ.pop(SUPERVISOR, ""):
        end_with_parent(int(supervisor), lambda: shutil.rmtree(scratch, ignore_errors=True))
    report = Report()
    console = Console()
    os.dup2(2, 1)  # whatever libraries print (Ray does when a process dies) goes to the log
    run = RunDir.open(told.run)
    with ProcessLog(run.log_of(f"{process}-0", told.attempt), f"{process}-0"):
        try:
            config = load_config(run.config)
            code = work(Job(run, config, told.model, told.attempt, told.resume, told.only_eval, report, console, scratch))
        except Exception as error:
            code = tell_failure(error, process, report)
        console.drain(END_SECONDS)
    return code
