"""What came of a run that was stopped before its end (Ctrl-C, a signal): how far it is, and the command that goes on with it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from segue.config import Config
from segue.report.read import read_report
from segue.report.steps import read_steps
from segue.report.table import print_summary
from segue.rundir import RunDir


def go_on_command(config_path: Path, run: Path, overrides: list[str], serial: bool) -> str:
    """The command line that resumes a run; `SEGUE_COMMAND` is what the user calls instead of `segue train`."""
    flags = ["--run", str(run), "--resume", *(["--serial"] if serial else [])]
    for override in overrides:
        flags += ["--set", override]
    return f"{os.environ.get('SEGUE_COMMAND', 'segue train')} {shlex.join([str(config_path), *flags])}"


def stopped_text(run: RunDir, config: Config, go_on: str) -> str:
    """One or two lines: the step, the newest checkpoint, and how to go on (`go_on`)."""
    steps = len({line["step"] for line in read_steps(run.metrics)})
    checkpoints = run.complete_checkpoints()
    if checkpoints:
        return (
            f"Stopped at step {steps} of {config.steps}; the newest checkpoint is {checkpoints[-1].path}. Go on with:\n  {go_on}"
        )
    if steps:
        return f"Stopped at step {steps} of {config.steps}, without a checkpoint: this run cannot go on, start it anew."
    return f"Stopped before a step was trained: there is no checkpoint, and {run.path} may be used again."


def as_it_can_be(sentence: str, run: RunDir) -> str:
    """The sentence of a failed run, without the advice to resume where there is no checkpoint."""
    if run.complete_checkpoints():
        return sentence
    copy = "go on with --resume on a copy of the run directory"
    for advice in (copy, "go on with --resume", "resume from the newest checkpoint"):
        sentence = sentence.replace(advice, "start the run anew")
    return sentence


def tell_failed(run: RunDir, go_on: str) -> None:
    """Print how to go on with a run that failed, if it has a checkpoint."""
    if checkpoints := run.complete_checkpoints():
        print(f"The newest checkpoint is {checkpoints[-1].path}. Go on with:\n  {go_on}", flush=True)


def tell_stopped(run: RunDir, config: Config, go_on: str) -> None:
    """Print the figures of the steps so far, if there are any, and `stopped_text`."""
    if run.metrics.is_file() and run.metrics.stat().st_size:
        print_summary(read_report(run.path)[0], f"Run {run.path}", sys.stdout)
    print(stopped_text(run, config, go_on), flush=True)
