"""`segue report RUN`: the summary of a run directory, whole or as far as it came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from segue.config import Config, load_config
from segue.errors import UserError
from segue.report.summary import partial_summary
from segue.rundir import RunDir, read_jsonl


def read_report(path: Path) -> tuple[dict[str, Any], str]:
    """The summary of a run and, if the run has none, one sentence about how far it came ("" otherwise).

    Raises `UserError` if `path` is no run directory or its files cannot be read.
    """
    run = RunDir.open(path)
    if run.summary.is_file():
        return _load(run.summary), ""
    lines = read_jsonl(run.metrics)
    config = load_config(run.config)
    known = partial_summary(config.mode, age_bound(run, config), lines)
    on = "a stopped run goes on with --resume" if run.complete_checkpoints() else "it has no checkpoint to go on from yet"
    sentence = (
        f"The run in {path} is not complete: {known['steps']} of {config.steps} steps are trained, "
        f"and the figures are those of the steps alone ({on})."
    )
    return known, sentence


def age_bound(run: RunDir, config: Config) -> int:
    """The greatest `staleness.max_age` that the run has had: earlier attempts may have had another than `config`."""
    earlier = (load_config(path).staleness.max_age for path in run.earlier_configs())
    return max(config.staleness.max_age, *earlier, 0)


def _load(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore it, or remove it to see the figures of the steps.") from None
    if not isinstance(summary, dict):
        raise UserError(f"{path} holds no summary: restore it, or remove it to see the figures of the steps.")
    return summary
