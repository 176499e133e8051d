"""The figures of a sweep as rows of text: for the console and the page. One list of columns serves both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.figures import Figures
from benchmarks.sweep_figures import Point

Arm = Mapping[str, Any]


def _number(key: str, form: str) -> Callable[[Arm], str]:
    return lambda arm: shown(arm.get(key), form)


def _idle(role: str) -> Callable[[Arm], str]:
    return lambda arm: shown(arm["idle_share"].get(role), ".0%")


def _age(arm: Arm) -> str:
    return f"{shown(arm['staleness_mean'], '.2f')} / {shown(arm['staleness_max'], 'd')} of {arm['staleness_bound']}"


FEW_STEPS = 5
"""A window below it is told of: what one step takes says little."""

COLUMNS: tuple[tuple[str, str, Callable[[Arm], str]], ...] = (
    ("tokens/s", "trained tokens per second", _number("tokens_per_second", ",.0f")),
    ("speed-up", "trained tokens per second over those of sync, same seed", _number("speedup", ".2f")),
    ("efficiency", "trained tokens per second over the lower ceiling", _number("efficiency", ".3f")),
    ("steps", "of the window of steady state, which all figures but the wasted are of", _number("window_steps", "d")),
    ("step s", "mean seconds of a step", _number("step_seconds", ".2f")),
    ("idle rollout", "share of their time that rollout nodes waited", _idle("rollout")),
    ("learner", "share of its time that the learner waited", _idle("learner")),
    ("env", "share of their time that env slots waited", _idle("envpool")),
    ("sched.", "share of its time that the scheduler waited", _idle("scheduler")),
    ("age mean / max", "steps between sampling and training a token", _age),
    ("re-prefill", "context tokens computed before, of all computed", _number("reprefill_share", ".1%")),
    ("wasted", "sampled tokens that no step trains, whole run", _number("wasted_share", ".1%")),
    (
        "len. bias",
        "mean length of trained episodes over that of all; below 1: short ones first",
        _number("length_bias", ".3f"),
    ),
    ("failed", "environment calls that failed, in the window", _number("env_failures", "d")),
)
"""Heading, what it means, and the cell of an arm."""


def shown(value: float | None, form: str) -> str:
    """A figure, or a dash where there is none."""
    return "–" if value is None else format(value, form)


def point_name(symbol: str, point: Mapping[str, Any]) -> str:
    """For instance "latency/generation 5, spread 1"."""
    spread = point.get("spread")
    return f"{symbol} {point['x']:g}" + (f", spread {spread:g}" if spread is not None else "")


def ceilings_text(point: Mapping[str, Any]) -> str:
    """A point's ceilings in words, and whether they make for a fair comparison."""
    if "balance" not in point:
        return "ceilings not measured"
    told = (
        f"generation alone {point['generation_ceiling']:,.0f}, training alone {point['training_ceiling']:,.0f} tokens/s, "
        f"balance {point['balance']:.2f}"
    )
    return told if point["balanced"] else f"{told}: NOT BALANCED (0.8 to 1.25)"


def window_text(point: Mapping[str, Any]) -> str:
    """A warning where figures are of few steps; else nothing."""
    steps = {name: arm["window_steps"] for name, arm in point["arms"].items() if arm["window_steps"] < FEW_STEPS}
    if not steps:
        return ""
    few = ", ".join(f"{name} {count}" for name, count in steps.items())
    return f"figures of few steps ({few}): give more --steps before you rely on them"


def rows(point: Mapping[str, Any]) -> list[list[str]]:
    """One row per arm: its name, then a cell per column."""
    return [[name, *(cell(arm) for _, _, cell in COLUMNS)] for name, arm in point["arms"].items()]


def point_text(symbol: str, point: Mapping[str, Any]) -> str:
    """A point on the console."""
    table = [["arm", *(heading for heading, _, _ in COLUMNS)], *rows(point)]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = [f"{point_name(symbol, point)}: {ceilings_text(point)}"]
    if few := window_text(point):
        lines.append(f"  {few}")
    for row in table:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells))
    return "\n".join(lines)


def run_text(symbol: str, point: Point, arm: str, seed: int, figures: Figures) -> str:
    """One run on the console: a sweep takes long."""
    share = f", efficiency {figures.efficiency.value:.3f}" if figures.efficiency else ""
    where = point_name(symbol, {"x": point.x, "spread": point.spread})
    return f"  {where}, seed {seed}, {arm}: {figures.tokens_per_second:,.0f} tokens/s{share}"
