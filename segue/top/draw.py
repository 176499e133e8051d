"""Draws a picture of a run for the terminal. Without colours too, work (█) and waiting (░) can be told apart."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from segue.metrics.vocabulary import OTHER, STATES, is_idle
from segue.monitoring.firing import Firing
from segue.report.console import GAP, step_fields
from segue.top.model import Ages, Picture, Process

BAR = 24
"""Cells of a busy bar."""
LEAST = 0.005
"""Shares below are not told in words."""
ALERTS = 6
_WORK, _IDLE = ("green", "cyan", "blue", "magenta"), ("yellow", "bright_black", "red", "bright_black")
_UNKNOWN = "–"


Alerts = tuple[Sequence[Firing], str]
"""What is known of alerts, and why not more."""


def draw(title: str, condition: str, picture: Picture, alerts: Alerts | None, of: int, wall: float) -> Group:
    """Everything on one screen: `of` is how many steps there will be, `wall` the moment (Unix seconds), `alerts` None where they
    are no question any more."""
    over = "all of the run" if picture.span is None else f"the last {_span(picture.span)}"
    moment = time.strftime("%H:%M:%S", time.localtime(wall))
    parts: list[RenderableType] = [Text.assemble((title, "bold"), f"  {condition}  {moment}, shares over {over}."), Text()]
    if picture.line is not None:
        parts += [_Fields(step_fields(picture.line, of)), Text()]
    if picture.processes:
        parts += [_processes(picture), Text()]
    parts.append(_figures([*figures(picture), *([] if alerts is None else _alerts(*alerts, wall))]))
    return Group(*parts)


class _Fields:
    """Fields side by side, on as many lines as the terminal's width asks for; none is torn apart."""

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = fields

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for field in self._fields:
            longer = f"{line}{GAP}{field}" if line else field
            if line and len(longer) > options.max_width:
                yield Text(line)
                longer = field
            line = longer
        yield Text(line)


def _processes(picture: Picture) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column()  # as if it could be wrapped: where there is little room, this one gives way; its texts are cut
    for process in picture.processes:
        busy = _UNKNOWN if process.busy is None else f"{process.busy:.0%}"
        table.add_row(Text(process.name, "bold"), bar(process), busy, _words(process))
    return table


def bar(process: Process, cells: int = BAR) -> Text:
    """The states in the order of the catalogue, work before waiting, each as long as its share."""
    role = process.name.partition("-")[0].partition(" ")[0]
    states = sorted(process.shares, key=lambda state: (is_idle(state), STATES[role].index(state)))
    text = Text()
    for state, length in zip(states, _cells([process.shares[state] for state in states], cells), strict=True):
        text.append(("░" if is_idle(state) else "▒" if state == OTHER else "█") * length, style_of(role, state))
    return text if states else Text("·" * cells, "bright_black")


def style_of(role: str, state: str) -> str:
    """The colour of a state: work and waiting have colours of their own."""
    if state == OTHER:
        return "white"
    alike = [other for other in STATES[role] if is_idle(other) == is_idle(state)]
    colours = _IDLE if is_idle(state) else _WORK
    return colours[alike.index(state) % len(colours)]


def _cells(shares: Sequence[float], cells: int) -> list[int]:
    """Whole cells that sum to `cells`: the largest remainders get what rounding down leaves."""
    exact = [share * cells for share in shares]
    whole = [int(length) for length in exact]
    order = sorted(range(len(shares)), key=lambda i: whole[i] - exact[i])
    for i in order[: cells - sum(whole)]:
        whole[i] += 1
    return whole


def _words(process: Process) -> Text:
    """What is wrong with the process, its host, its version, the state it is in now, and the states by share."""
    text = Text(no_wrap=True, overflow="ellipsis")
    if process.trouble:
        text.append(f"{process.trouble}  ", "bold red")
    if process.host:
        text.append(f"on {process.host}  ")
    if process.bare:
        text.append("no weights yet  " if process.count == 1 else f"{process.bare} without weights yet  ", "bold")
    if process.version is not None or process.behind:
        version = "" if process.version is None else f"version {process.version}"
        behind = f"{process.behind} behind" if process.version is not None else f"up to {process.behind} versions behind"
        text.append(f"{version}{', ' if version and process.behind else ''}{behind if process.behind else ''}  ", "bold")
    ranked = sorted(process.shares.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{state} {share:.0%}" for state, share in ranked if share >= LEAST)
    if process.now:
        text.append(f"in {process.now}{'; ' if shares else ''}")
    text.append(shares, "bright_black")
    return text


def figures(picture: Picture) -> Iterator[tuple[str, str]]:
    """(subject, figures) of everything but processes and alerts; what is not known is left out."""
    if picture.success:
        yield "success", ", ".join(f"{name} training {value:.3f}" for name, value in picture.success.items())
    if picture.queues:
        yield (
            "queues",
            ", ".join(f"{q.name} {q.depth:,}" + (f" of {q.capacity:,}" if q.capacity else "") for q in picture.queues),
        )
    if picture.in_flight is not None:
        slots = "" if picture.requests is None else f", {picture.requests:,} requests in an engine"
        yield "in flight", f"{picture.in_flight:,} episodes{slots}"
    yield "staleness", _ages(picture.ages)
    if picture.unpublished:
        yield "versions", "none yet"
    elif picture.newest is not None:
        yield "versions", f"newest {picture.newest}{_behind(picture.processes)}"
    if picture.latency is not None:
        latency = picture.latency
        yield "env steps", f"p50 {_seconds(latency.p50)}, p95 {_seconds(latency.p95)} ({latency.over})"
    if picture.per_second:
        yield "tokens/s", _rates(picture.per_second)


def _ages(ages: Ages) -> str:
    return (
        f"last step mean {_n(ages.last_mean, '.2f')}, max {_n(ages.last_max, 'd')}; "
        f"whole run mean {_n(ages.mean, '.2f')}, max {_n(ages.max, 'd')}; bound {ages.bound} steps"
    )


def _behind(processes: Sequence[Process]) -> str:
    late = [process for process in processes if process.behind or process.bare]
    if named := [f"{one.name} {'none yet' if one.bare else f'{one.behind} behind'}" for one in late if one.count == 1]:
        return ": " + ", ".join(named)
    if late:  # some of many, who are not shown one by one
        return ""
    return ", all nodes have it" if any(process.version is not None for process in processes) else ""


def _rates(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())


def _alerts(alerts: Sequence[Firing], unknown: str, wall: float) -> Iterator[tuple[str, str]]:
    if unknown or not alerts:
        yield "alerts", unknown or "none"
    for i, alert in enumerate(alerts[:ALERTS]):
        ago = max(0.0, wall - alert.since)
        yield "" if i else "alerts", f"{alert.name} {alert.state} for {ago:.0f} s: {alert.text} ({alert.runbook})"
    if len(alerts) > ALERTS:
        yield "", f"and {len(alerts) - ALERTS} older ones"


def _figures(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for subject, text in rows:
        table.add_row(subject, Text(text, "bold red" if " firing for " in text else ""))
    return table


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10.0 else f"{seconds:.2g} s"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"


def _n(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else format(value, form)
