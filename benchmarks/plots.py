"""How plots of benchmarks look, and those of a sweep: speed-up, efficiency, idle shares, staleness over its axis, as SVG and PNG.

Colours are Okabe and Ito's, told apart by colour-blind readers too; each arm has a marker of its own besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.arms import ARMS
from benchmarks.command import install
from segue.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#7F7F7F")
"""Okabe and Ito (2008), "Color Universal Design"; grey in the place of yellow, which is too pale for a line on white."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
PANEL = (4.2, 3.2)
"""Inches."""
DPI = 150
STYLE: dict[Any, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "font.size": 9.0,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
}

Document = Mapping[str, Any]
Value = Callable[[Mapping[str, Any]], float | None]
Values = Callable[[Mapping[str, Any]], Sequence[float]]


class Drawn(msgspec.Struct, frozen=True):
    """A plot that was drawn: `svg` is the file's text."""

    name: str
    title: str
    svg: str


class Panel(msgspec.Struct, frozen=True):
    """One set of axes. `spread` picks the points; `upper` is drawn dotted beside `value`, `each` (of all seeds) as a bar over
    its range; `level` is a line across."""

    title: str
    ylabel: str
    spread: float | None
    value: Value
    upper: Value | None = None
    each: Values | None = None
    level: float | None = None
    share: bool = False


def require() -> None:
    """Raises `UserError` where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise UserError(f"Plots need the package matplotlib, which is not installed: {install('plots')} brings it.")


def draw(document: Document, folder: Path) -> list[Drawn]:
    """Every plot for which the document has figures, as NAME.svg and NAME.png in `folder`."""
    require()
    drawn: list[Drawn] = []
    for name, title, panels in _plots(document):
        if any(_has(document, panel) for panel in panels):
            svg = _draw(document, name, panels, folder)
            drawn.append(Drawn(name, title, svg))
    return drawn


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """NAME.svg and NAME.png. Without a date: the same figures give the same file."""
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=DPI)
    return paths


def _plots(document: Document) -> list[tuple[str, str, list[Panel]]]:
    spreads = list(dict.fromkeys(point["spread"] for point in document["points"]))

    def over_spreads(ylabel: str, value: Value, **more: Any) -> list[Panel]:
        label = document["sweep"]["spread_label"]
        return [Panel(f"{label} = {s:g}" if s is not None else "", ylabel, s, value, **more) for s in spreads]

    def idle(role: str) -> Value:
        return lambda arm: arm["idle_share"].get(role)

    shares = [
        msgspec.structs.replace(panel, title=", ".join(filter(None, (f"{role} idle", panel.title))))
        for role in ("rollout", "learner")
        for panel in over_spreads("share of time waiting", idle(role), share=True)
    ]
    return [
        (
            "speedup",
            "Speed-up over sync",
            over_spreads("trained tokens/s ÷ those of sync", _of("speedup"), each=_all("speedups"), level=1.0),
        ),
        (
            "efficiency",
            "Efficiency",
            over_spreads("trained tokens/s ÷ lower ceiling", _of("efficiency"), each=_all("efficiencies"), level=1.0, share=True),
        ),
        ("idle", "Idle shares", shares),
        (
            "staleness",
            "Staleness of trained tokens (dotted: the greatest)",
            over_spreads("age in steps", _of("staleness_mean"), upper=_of("staleness_max")),
        ),
    ]


def _of(key: str) -> Value:
    return lambda arm: arm.get(key)


def _all(key: str) -> Values:
    return lambda arm: arm.get(key) or ()


def _points(document: Document, panel: Panel) -> list[Mapping[str, Any]]:
    """A panel's points; one at 0, where there is nothing to spread, stands in every panel that has none of its own."""
    points = {point["x"]: point for point in document["points"] if point["x"] == 0.0}
    points |= {point["x"]: point for point in document["points"] if point["spread"] == panel.spread}
    return [points[x] for x in sorted(points)]


def _has(document: Document, panel: Panel) -> bool:
    return any(panel.value(arm) is not None for point in _points(document, panel) for arm in point["arms"].values())


def _draw(document: Document, name: str, panels: Sequence[Panel], folder: Path) -> str:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(PANEL[0] * columns + 1.6, PANEL[1] * rows), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False)
        for panel, axis in zip(panels, axes.flat, strict=False):
            _panel(document, panel, axis)
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_axis_off()
        _legend(figure, axes.flat[0])
        save(figure, folder, name)
    return (folder / f"{name}.svg").read_text(encoding="utf-8")


def _panel(document: Document, panel: Panel, axis: Axes) -> None:
    points = _points(document, panel)
    known = list(ARMS)
    for arm in document["arms"]:
        i = known.index(arm)  # an arm looks the same in every sweep, whichever others ran
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        for value, line in ((panel.value, "-"), (panel.upper, ":")):
            if value is None:
                continue
            found = [(point["x"], y) for point in points if (y := value(point["arms"][arm])) is not None]
            if found:
                xs, ys = zip(*found, strict=True)
                label = arm if line == "-" else "_nolegend_"
                axis.plot(xs, ys, linestyle=line, color=colour, marker=marker if line == "-" else "", label=label)
        for point in points:
            if panel.each is not None and len(seeds := panel.each(point["arms"][arm])) > 1:
                axis.vlines(point["x"], min(seeds), max(seeds), colors=colour, linewidth=1.0, alpha=0.7)
    if panel.level is not None:
        axis.axhline(panel.level, color="#888888", linewidth=0.8, zorder=0)
    axis.set_xlabel(document["sweep"]["axis"])
    axis.set_ylabel(panel.ylabel)
    axis.set_ylim(bottom=0.0, top=max(1.05, axis.get_ylim()[1]) if panel.share else None)  # an efficiency may be above 1
    axis.set_xticks([point["x"] for point in points])
    if panel.title:
        axis.set_title(panel.title, fontsize=9.0)


def _legend(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper")
