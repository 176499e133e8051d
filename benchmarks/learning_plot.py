"""The picture of the staleness ablation: success against age, a line per correction, with intervals over seeds."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.learning_cells import CORRECTIONS, SYNC
from benchmarks.plots import COLOURS, MARKERS, STYLE, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(figures: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write success.svg and success.png; nothing, and an empty list, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "success"}):
        return save(_draw(Figure(figsize=(7.5, 4.5), layout="constrained"), figures), folder, "success")


def _draw(figure: Figure, figures: Mapping[str, Any]) -> Figure:
    axes = figure.subplots()
    rows = figures["rows"]
    ages = sorted({r["age"] for r in rows})
    place = {age: index for index, age in enumerate(ages)}
    for r in rows:
        if r["correction"] == SYNC:
            axes.axhline(r["success"], color="black", linewidth=1, linestyle="--", label="synchronous (η = 0)")
            if r["success_interval"] is not None:
                axes.axhspan(*r["success_interval"], color="black", alpha=0.08, linewidth=0)
    for number, name in enumerate(CORRECTIONS):
        mine = [r for r in rows if r["correction"] == name]
        if not mine:
            continue
        colour, marker = COLOURS[number + 1], MARKERS[number]  # the first colour, black, is synchronous training's
        shift = 0.07 * (number - (len(CORRECTIONS) - 1) / 2)  # side by side, so that bars can be told apart
        below = [r["success"] - r["success_interval"][0] if r["success_interval"] is not None else 0.0 for r in mine]
        axes.errorbar(
            [place[r["age"]] + shift for r in mine],
            [r["success"] for r in mine],
            yerr=below,
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.3,
            capsize=2.5,
            label="no correction" if name == "none" else name,
        )
    axes.set_xticks(range(len(ages)), [str(age) for age in ages])
    axes.set_xlabel("age η of every trained token, in steps")
    axes.set_ylabel("success on held-out tasks")
    axes.set_ylim(0.0, 1.02)
    axes.legend(fontsize=8)
    seeds = sorted({seed for r in rows for seed in r["seeds"]})
    axes.set_title(f"Staleness ablation, {len(seeds)} seed{'s' * (len(seeds) != 1)}, 95 % intervals (Student's t)", fontsize=10)
    return figure
