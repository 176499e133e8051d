"""A sweep as one HTML file that needs nothing beside it: plots inline, no scripts, nothing fetched."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.plots import Drawn
from benchmarks.result import busy
from benchmarks.sweep_table import COLUMNS, ceilings_text, point_name, rows, window_text

Document = Mapping[str, Any]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
table { border-collapse: collapse; font-size: .85rem; } .wide { overflow-x: auto; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.unbalanced { color: #b03000; } .note { color: #555; }
figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; } pre { background: #f5f5f5; padding: .6rem; overflow-x: auto; }
dt { font-weight: 600; } dd { margin: 0 0 .3rem 1rem; }
"""


def build(document: Document, drawn: Sequence[Drawn]) -> str:
    """The page of a results.json with its plots."""
    title = f"{document['title']} ({document['time']} time)"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p class='note'>{_text(where(document))}</p>",
        *(f"<p class='unbalanced'>{_text(note)}</p>" for note in notes(document)),
        *figures(drawn),
        "<h2>Figures</h2>",
        *(_point(document, point) for point in document["points"]),
        "<h3>Columns</h3>",
        _terms((heading, meaning) for heading, meaning, _ in COLUMNS),
        "<h2>What was run</h2>",
        f"<pre>{_text(document['command'])}</pre>",
        "<h3>Arms</h3>",
        _terms((name, arm["about"]) for name, arm in document["arms"].items()),
        "<h3>What all arms share</h3>",
        _terms((key, _plain(value)) for key, value in document["setup"].items() if key != "scenario"),
        *_scenario(document["setup"].get("scenario")),
    ]
    return whole(title, parts)


def whole(title: str, parts: Sequence[str]) -> str:
    """A page of these parts of HTML under a title of plain text."""
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{_text(title)}</title>"
    body = "\n".join(parts)
    return f"<!DOCTYPE html>\n<html lang='en'><head>{head}<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"


def inline(drawn: Drawn) -> str:
    """An SVG file's text as an element: without its prologue and metadata, and with ids that no other plot has."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", drawn.svg[drawn.svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{drawn.name}-', svg)
    svg = re.sub(r'href="#', f'href="#{drawn.name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{drawn.name}-", svg)
    return svg.replace("<svg", f"<svg role='img' aria-label='{_text(drawn.title)}'", 1)


def figures(drawn: Sequence[Drawn]) -> Iterable[str]:
    """The plots as HTML."""
    for plot in drawn:
        yield f"<h2>{_text(plot.title)}</h2><figure>{inline(plot)}</figure>"


def _point(document: Document, point: Mapping[str, Any]) -> str:
    kind = "" if point.get("balanced", True) else " class='unbalanced'"
    few = f"<p class='unbalanced'>{_text(told)}</p>" if (told := window_text(point)) else ""
    heading = "".join(f"<th title='{_text(meaning)}'>{_text(name)}</th>" for name, meaning, _ in COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows(point))
    return (
        f"<h3>{_text(point_name(document['sweep']['symbol'], point))}</h3><p{kind}>{_text(ceilings_text(point))}</p>{few}"
        f"<div class='wide'><table><tr><th>arm</th>{heading}</tr>{body}</table></div>"
    )


def _scenario(scenario: Mapping[str, Any] | None) -> Iterable[str]:
    if scenario:
        yield f"<h3>Scenario {_text(scenario['name'])}</h3><p>{_text(scenario['about'])}</p>"
        if scenario["source"]:
            yield f"<p>Source: {_text(scenario['source'])}</p>"
        items = "".join(f"<li>{_text(line)}</li>" for line in scenario["assumptions"])
        yield f"<p>Assumptions:</p><ul>{items}</ul>"


def notes(document: Document) -> Iterable[str]:
    """What a reader has to know before the figures: a machine that was not its own, points that are still missing."""
    if document["time"] == "real" and (note := busy(document["machine"])):
        yield note
    if missing := document.get("missing"):
        points = ", ".join(point_name(document["sweep"]["symbol"], point) for point in missing)
        yield f"Not complete: {len(missing)} of {len(missing) + len(document['points'])} points are missing ({points})."


def where(document: Document) -> str:
    """When, on what and with what it was run."""
    machine, versions = document["machine"], document["versions"]
    return (
        f"{document['date']}, {machine['cpu']}, {machine['cores']} cores, Segue {versions['segue']} ({versions['git_sha']}), "
        f"Python {versions['python']}, seeds {', '.join(map(str, document['seeds']))}"
    )


def _terms(items: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{_text(key)}</dt><dd>{_text(value)}</dd>' for key, value in items)}</dl>"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return str(value)


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
