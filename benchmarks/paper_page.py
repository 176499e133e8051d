"""Published rows as pictures and as one HTML file that needs nothing beside it."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.page import figures, where, whole
from benchmarks.paper_figures import HEADINGS, reasons, table
from benchmarks.plots import COLOURS, STYLE, Drawn, require, save
from benchmarks.sweep_table import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Document = Mapping[str, Any]

_KINDS = {
    "published": ("#7F7F7F", "published arm"),
    "segue": (COLOURS[5], "Segue, same bound"),
    "beyond": (COLOURS[1], "Segue, looser bound"),
}
_WIDTH, _LINE = 8.0, 0.28
"""Inches: of a plot, and of one of its lines."""

READING = (
    "Over best published: step seconds of the fastest published arm over those of Segue's best policy under the same staleness "
    "bound. At least 1.15 is wanted; where it is less, the row says why."
)

ARM_COLUMNS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("step s", "mean seconds of a step", lambda arm: shown(arm["step_seconds"], ",.1f")),
    ("speed-up", "over the slowest published arm", lambda arm: shown(arm["speedup"], ".2f")),
    ("tokens/s", "trained tokens per second", lambda arm: shown(arm["tokens_per_second"], ",.0f")),
    ("training", "share of a step that training alone takes", lambda arm: shown(arm["training_share"], ".0%")),
    ("idle rollout", "share of their time that rollout nodes waited", lambda arm: shown(arm["idle_share"].get("rollout"), ".0%")),
    (
        "age of start",
        "mean steps from the start of an episode's generation to its training",
        lambda arm: shown(arm["start_age"], ".2f"),
    ),
    (
        "age mean / max",
        "steps between sampling and training a token",
        lambda arm: f"{shown(arm['staleness_mean'], '.2f')} / {shown(arm['staleness_max'], 'd')} of {arm['staleness_bound']}",
    ),
    ("wasted", "sampled tokens that no step trains, whole run", lambda arm: shown(arm["wasted_share"], ".1%")),
    ("length", "mean sampled tokens of trained episodes", lambda arm: shown(arm["mean_length"], ",.0f")),
)
"""Heading, what it means, and the cell of an arm."""


# --- plots ------------------------------------------------------------------------------------------------------------------


def draw(document: Document, folder: Path) -> list[Drawn]:
    """Reproduced over published figures, and the arms' speed-ups, as SVG and PNG in `folder`."""
    require()
    rows = [row for row in document["rows"] if "claims" in row]
    claims = [(row, claim) for row in rows for claim in row["claims"]]
    arms = [(row, name, arm) for row in rows for name, arm in row["arms"].items()]
    return [
        _drawn("claims", "Reproduced over published", len(claims), lambda axis: _claims(axis, claims), folder),
        _drawn("arms", "Speed-up over the slowest published arm", len(arms), lambda axis: _arms(axis, arms), folder),
    ]


def _drawn(name: str, title: str, lines: int, fill: Callable[[Axes], None], folder: Path) -> Drawn:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, _LINE * lines + 1.2), layout="constrained")
        FigureCanvasAgg(figure)
        axis = figure.subplots()
        fill(axis)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=9.0)
        figure.legend(loc="outside lower center", ncols=len(_KINDS))
        save(figure, folder, name)
    return Drawn(name, title, (folder / f"{name}.svg").read_text(encoding="utf-8"))


def _claims(axis: Axes, claims: Sequence[tuple[Document, Document]]) -> None:
    """A dot per claim on its tolerance."""
    for y, (_, claim) in enumerate(claims):
        slack = claim["tolerance"] / (claim["published"] if claim["absolute"] else 1.0)
        axis.barh(y, 2 * slack, left=1.0 - slack, color="#dddddd", height=0.6, label="tolerance" if y == 0 else None)
        colour = COLOURS[3] if claim["within"] else COLOURS[4]
        axis.plot([claim["reproduced"] / claim["published"]], [y], "o", color=colour)
    axis.axvline(1.0, color="#888888", linewidth=0.8, zorder=0)
    axis.set_yticks(range(len(claims)), [f"{row['table']} {row['row']}: {claim['name']}" for row, claim in claims], fontsize=7.5)
    axis.set_xlabel("reproduced ÷ published")


def _arms(axis: Axes, arms: Sequence[tuple[Document, str, Document]]) -> None:
    """A bar per arm."""
    told: set[str] = set()
    for y, (_, _, arm) in enumerate(arms):
        colour, label = _KINDS[arm["kind"]]
        axis.barh(y, arm["speedup"], color=colour, height=0.7, label=None if label in told else label)
        told.add(label)
    axis.axvline(1.0, color="#888888", linewidth=0.8)
    axis.set_yticks(range(len(arms)), [f"{row['table']} {row['row']}: {name}" for row, name, _ in arms], fontsize=7.5)
    axis.set_xlabel("step seconds of the slowest published arm ÷ those of the arm")


# --- the page ---------------------------------------------------------------------------------------------------------------


def build(document: Document, drawn: Sequence[Drawn]) -> str:
    """The page of a results.json with its plots."""
    title = f"{document['title']} ({document['time']} time)"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p class='note'>{_text(where(document))}</p>",
        _table(HEADINGS, table(document["rows"])),
        f"<p class='note'>{_text(READING)}</p>",
        *figures(drawn),
        *(part for row in document["rows"] for part in _row(row)),
        "<h2>Columns of arms</h2>",
        "<dl>" + "".join(f"<dt>{_text(name)}</dt><dd>{_text(about)}</dd>" for name, about, _ in ARM_COLUMNS) + "</dl>",
        "<h2>What was run</h2>",
        f"<pre>{_text(document['command'])}</pre>",
    ]
    return whole(title, parts)


def _row(row: Document) -> Iterable[str]:
    yield f"<h2>{_text(row['table'])}: {_text(row['row'])}</h2>"
    yield f"<p>{_text(row.get('about', ''))}</p><p>Source: {_text(row['source'])}</p>"
    if why := reasons(row):
        yield f"<ul class='unbalanced'>{''.join(f'<li>{_text(reason)}</li>' for reason in why)}</ul>"
    if "arms" not in row:
        return
    lines = [[name, *(cell(arm) for _, _, cell in ARM_COLUMNS), arm["about"]] for name, arm in row["arms"].items()]
    yield _table(("arm", *(name for name, _, _ in ARM_COLUMNS), "what it is"), lines)
    if row["scale"] < 1.0:
        yield f"<p>Played at {row['scale']:g} of the published size: {_text(row['scale_why'])}</p>"
    yield f"<p>Assumptions:</p><ul>{''.join(f'<li>{_text(line)}</li>' for line in row['assumptions'])}</ul>"


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in headings)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>"


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
