"""The console's line per learner step: fixed fields in a fixed order, one width each, so that runs can be read down a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from segue.report import steps

_ABSENT = "–"
GAP = "  "
"""Between two fields."""


def step_text(line: Mapping[str, Any], of: int) -> str:
    """One line of metrics.jsonl as text: its `step_fields`."""
    return GAP.join(step_fields(line, of))


def step_fields(line: Mapping[str, Any], of: int) -> Sequence[str]:
    """Names and figures of one line of metrics.jsonl; `of` is the number of steps in all. What a line lacks shows as a dash.

    Fields: step, seconds, reward, success, age (mean/max), trained tokens, kept share, loss, log-probability gap (max),
    gradient norm, groups in the queue, episodes in flight.
    """
    ages = line.get("ages") or []
    age = f"{_number(steps.age_mean(ages), '.2f')}/{_number(steps.age_max(ages), 'd')}"
    fields = (
        ("step", f"{line['step'] + 1:>{len(str(of))}}/{of}"),
        ("seconds", _right(line, "step_seconds", ".1f", 5)),
        ("reward", _right(line, "reward_mean", ".3f", 6)),
        ("success", _right(line, "info_success", ".3f", 5)),
        ("age", f"{age:>6}"),
        ("tokens", _right(line, "tokens_trained", ".0f", 6)),
        ("kept", _right(line, "kept_fraction", ".3f", 5)),
        ("loss", _right(line, "loss", ".4f", 8)),
        ("gap", _right(line, "logprob_gap_max", ".1e", 7)),
        ("norm", _right(line, "grad_norm", ".2f", 6)),
        ("queue", _right(line, "queue_groups", ".0f", 3)),
        ("in flight", _right(line, "in_flight", ".0f", 4)),
    )
    return [f"{name} {text}" for name, text in fields]


def _right(line: Mapping[str, Any], key: str, form: str, width: int) -> str:
    return f"{_number(steps.number(line, key), form):>{width}}"


def _number(value: float | None, form: str) -> str:
    return _ABSENT if value is None else format(value, form)
