"""`segue report RUN --html`: a run as one HTML file that needs nothing beside it: curves inline, no scripts, nothing fetched."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from segue.config import Config, load_config
from segue.errors import DiskFailed, UserError
from segue.files import read_jsonl, write_atomic
from segue.report.curves import SMOOTHING, Chart, charts
from segue.report.page_style import STYLE
from segue.report.read import age_bound, condition_of, goes_on, read_report, recorded_evals
from segue.report.steps import read_steps
from segue.report.svg import svg
from segue.report.table import rows
from segue.rundir import ATTEMPTS, RunDir

HEAD = """<!DOCTYPE html>
<html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width'>
<meta name='color-scheme' content='light dark'><title>{title}</title><style>{style}</style></head><body>
"""


def write_page(path: Path, file: Path | None = None, now: datetime | None = None) -> Path:
    """Write the page of the run in `path` to `file` (default: report.html in it), and return where it is.

    Raises `UserError` if there is no such run, or the file cannot be written.
    """
    run = RunDir.open(path)
    text = page_of(run, now or datetime.now())
    there = file or run.page
    if there.is_dir() or not there.parent.is_dir():
        why = "it is a folder" if there.is_dir() else f"there is no folder {there.parent}"
        raise UserError(f"The page cannot be written to {there} ({why}): name a file in a folder that exists.")
    try:
        write_atomic(there, text.encode())
    except DiskFailed as error:
        raise UserError(error.place) from error
    return there


def page_of(run: RunDir, now: datetime) -> str:
    """The page of a run as its directory is now."""
    config = load_config(run.config)
    lines = read_steps(run.metrics)
    summary, _ = read_report(run.path)
    condition = condition_of(run, config, len({line["step"] for line in lines}), goes_on(run))
    made, missing = charts(lines, age_bound(run, config), recorded_evals(run))
    attempts = read_jsonl(run.path / ATTEMPTS)
    parts = [
        f"<header><h1>{_text(run.name)}</h1>",
        f"<p class='condition {condition.kind.replace(' ', '-')}'>{_text(condition.sentence)}</p>",
        _terms(facts(config, attempts, now)),
        "</header>",
        _charts(made, int(lines[-1]["step"]) + 1) if lines else "<p>No step is trained yet.</p>",
        f"<p class='note'>{_how(made)}</p>",
        _missing(missing) if lines else "",
        "<h2>Figures</h2>",
        _table(rows(summary)),
        *_attempts(attempts),
        f"<details><summary>Config</summary><pre>{_text(run.config.read_text(encoding='utf-8'))}</pre></details>",
    ]
    return HEAD.format(title=_text(run.name), style=STYLE) + "\n".join(filter(None, parts)) + "\n</body></html>\n"


def facts(config: Config, attempts: Sequence[Mapping[str, Any]], now: datetime) -> Iterator[tuple[str, str]]:
    """What the run was: names and values for the head of the page."""
    first, last = (attempts[0], attempts[-1]) if attempts else ({}, {})
    yield "task", f"{config.task.env}, {config.task.train_tasks:,} tasks"
    yield "model", str(config.model.path or "warm start")
    yield "mode", f"{config.mode}, age of at most {config.staleness.max_age} steps, updates by {config.update.inflight}"
    learner, group = config.learner, f"{config.batch.groups} groups × {config.group.size} episodes"
    yield "batch", f"{group}; {learner.advantage}, {learner.correction}, lr {learner.lr:g}"
    yield "rollout", f"{config.rollout.nodes} × {config.rollout.engine}, {config.rollout.slots} slots"
    yield "learner", f"{learner.ranks} rank{'s' * (learner.ranks > 1)}"
    yield "started", str(first.get("started", "not known")).replace("T", " ")
    if len(attempts) > 1:
        yield "attempts", str(len(attempts))
    yield "Segue", " ".join(filter(None, (str(last.get("version", "")), str(last.get("git_sha", ""))))) or "not known"
    yield "page of", f"{now:%Y-%m-%d %H:%M:%S}"


def _charts(made: Sequence[Chart], last: int) -> str:
    return f"<main class='charts'>{''.join(_figure(chart, last) for chart in made)}</main>"


def _figure(chart: Chart, last: int) -> str:
    keys = "".join(
        f"<span class='key'><i class='s{i}{' dashed' if series.style in ('dashed', 'high') else ''}"
        f"{' round' if series.style == 'mark' else ''}'></i>{_text(series.name)}</span>"
        for i, series in enumerate(chart.series)
    )
    return (
        f"<figure><figcaption><h3>{_text(chart.title)}</h3><p>{_text(chart.about)}</p><div class='keys'>{keys}</div></figcaption>"
        f"{svg(chart, float(last))}</figure>"
    )


def _how(made: Sequence[Chart]) -> str:
    """What a reader of the curves must know."""
    longest = max((len(series.points) for chart in made for series in chart.series), default=0)
    thin = f" Thin: each point; thick: its mean with its neighbours to both sides (a {SMOOTHING}th of the run each)."
    return "Point at a chart to read its figures." + (thin if longest >= SMOOTHING else "")


def _missing(titles: Sequence[str]) -> str:
    if not titles:
        return ""
    names = ", ".join(titles)
    return f"<p class='note'>Left out, because metrics.jsonl of this run does not tell (yet): {_text(names)}.</p>"


def _table(found: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"<tr><th>{_text(subject)}</th><td>{_text(text)}</td></tr>" for subject, text in found)
    return f"<div class='wide'><table>{body}</table></div>"


def _attempts(attempts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where there were several: when each began, and from which step."""
    if len(attempts) > 1:
        yield "<h2>Attempts</h2>"
        yield _table(
            (
                str(attempt.get("attempt", "")),
                f"{str(attempt.get('started', '')).replace('T', ' ')}, "
                + (f"from step {step}" if (step := attempt.get("resumed_from")) is not None else "from the beginning"),
            )
            for attempt in attempts
        )


def _terms(items: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<div><dt>{_text(key)}</dt><dd>{_text(value)}</dd></div>' for key, value in items)}</dl>"


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
