"""`segue report RUN`: the summary of a run directory, whole or as far as it came."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from segue.config import Config, load_config
from segue.errors import UserError
from segue.metrics.scrape import Scraper
from segue.report.steps import read_steps
from segue.report.summary import partial_summary
from segue.report.table import rows
from segue.rundir import RunDir

ASK_SECONDS = 2.0


def read_report(path: Path) -> tuple[dict[str, Any], str]:
    """The summary of a run and, if the run has none, one sentence about how far it came ("" otherwise).

    Raises `UserError` if `path` is no run directory or its files cannot be read.
    """
    run = RunDir.open(path)
    if run.summary.is_file():
        return read_summary(run), ""
    lines = read_steps(run.metrics)
    config = load_config(run.config)
    known = partial_summary(config.mode, age_bound(run, config), lines)
    of = f"{known['steps']} of {config.steps} steps are trained, and the figures are those of the steps alone"
    if goes_on(run):
        return known, f"The run in {path} goes on: {of}."
    on = "a stopped run goes on with --resume" if run.complete_checkpoints() else "it has no checkpoint to go on from yet"
    return known, f"The run in {path} is not complete: {of} ({on})."


def goes_on(run: RunDir) -> bool:
    """Whether a process owns the run or, where a lock is not seen (the run is on other hosts), one of its processes answers."""
    try:
        return run.held() or bool(Scraper(run, ASK_SECONDS).ask()[0])
    except UserError:  # a damaged target: nothing is known
        return False


def age_bound(run: RunDir, config: Config) -> int:
    """The greatest `staleness.max_age` that the run has had: earlier attempts may have had another than `config`."""
    earlier = (load_config(path).staleness.max_age for path in run.earlier_configs())
    return max(config.staleness.max_age, *earlier, 0)


def recorded_evals(run: RunDir) -> dict[str, Any]:
    """The evaluations so far by name, as summary.json has them; empty if there are none. Raises `UserError` for other things."""
    found = _load(run.evals) if run.evals.is_file() else {}
    if not all(of is None or (isinstance(of, dict) and isinstance(of.get("success"), (int, float))) for of in found.values()):
        raise UserError(f"{run.evals} holds no evaluations: {_REMEDY}.")
    return found


def read_summary(run: RunDir) -> dict[str, Any]:
    """summary.json. Raises `UserError` where it cannot be read, or lacks what its table shows."""
    summary = _load(run.summary)
    try:
        for _ in rows(summary):
            pass
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{run.summary} is no summary of this version of Segue, or damaged: {_REMEDY}.") from None
    return summary


_REMEDY = "restore it, or remove it to see the figures of the steps"


def _load(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}): {_REMEDY}.") from None
    if not isinstance(summary, dict):
        raise UserError(f"{path} holds no figures: {_REMEDY}.")
    return summary


@dataclass(frozen=True)
class Condition:
    """How a run stands: it goes on, it is done, or it was stopped or failed before its end; in a sentence."""

    kind: Literal["goes on", "done", "stopped"]
    sentence: str


def condition_of(run: RunDir, config: Config, steps: int, going: bool) -> Condition:
    """How the run stands after `steps` steps, as its directory shows; `going`: whether it goes on."""
    of = f"{steps} of {config.steps} steps"
    if going:
        return Condition("goes on", f"It goes on: {of} are trained.")
    if run.summary.is_file():
        seconds = read_summary(run)["wall_seconds"]
        return Condition("done", f"It is done: {of} in {seconds:.0f} s." if seconds else f"It is done: {of}.")
    saved = run.complete_checkpoints()
    go_on = f"{saved[-1].path.name} is its newest checkpoint, from which --resume goes on" if saved else "it has no checkpoint"
    return Condition("stopped", f"It ended early, stopped or failed: {of} are trained; {go_on} (logs: {run.logs}).")
