"""The table at the end of a run, also shown by `segue report`: the summary for people."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import IO, Any

from rich.console import Console
from rich.table import Table

_UNKNOWN = "–"


def summary_table(summary: Mapping[str, Any], title: str) -> Table:
    """A whole or partial summary as a table of subjects and figures."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for subject, text in rows(summary):
        table.add_row(subject, text)
    return table


def print_summary(summary: Mapping[str, Any], title: str, file: IO[str]) -> None:
    """The table on a terminal; elsewhere one line per row, however long, so that no figure is torn apart."""
    if file.isatty():
        width = os.get_terminal_size(file.fileno()).columns  # rich asks descriptors 0 to 2, which may be no terminal
        Console(file=file, width=width or None).print(summary_table(summary, title))
        return
    found = list(rows(summary))
    width = max(len(subject) for subject, _ in found)
    print(title, *(f"{subject:<{width}} {text}" for subject, text in found), sep="\n", file=file, flush=True)


def rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(subject, figures) of everything the summary holds; of an evaluation alone (`segue eval`), what it found."""
    if (found := (summary.get("eval") or {}).get("eval")) is not None:
        yield "success", f"{found['success']:.3f}"
        yield "tasks", f"{_n(found['n'])} held out, {_n(found['failed'])} failed"
        for note in summary.get("notes") or []:
            yield "note", note
        return
    attempts = summary.get("attempts", 1)
    ended = f", {attempts} attempts together" if attempts > 1 else ""
    yield "run", f"{summary['mode']}, {_n(summary['steps'])} steps in {_n(summary['wall_seconds'], '.1f')} s{ended}"
    if evals := summary.get("eval"):
        yield "success", _success(evals)
    t = summary["tokens"]
    generated = f"{_n(t['generated'])} generated" + (" in the last attempt" if attempts > 1 else "")
    yield "tokens", f"{generated}, {_n(t['trained'])} trained, {_n(t['masked_age'])} masked for their age"
    s = summary["staleness"]
    yield (
        "age",
        f"mean {_n(s['mean'], '.2f')}, p99 {_n(s['p99'])}, max {_n(s['max'])} of at most {_n(s['bound'])} steps; "
        f"{_n(s['multi_version_ratio'], '.1%')} of trained trajectories under several versions",
    )
    if e := summary.get("episodes"):
        yield "episodes", f"{_n(e['admitted'])} admitted, {_n(e['finished'])} finished, {_n(e['trained'])} trained"
        yield "", f"paused {_n(e['paused'])} times, resumed {_n(e['resumed'])} times"
        for what in ("states", "dropped", "failed"):
            if any(e[what].values()):
                yield "", f"{what}: {_parts(e[what])}"
    if p := summary.get("prefill"):
        causes = {name: n for name, n in p.items() if name not in ("cached", "engine_total")}
        yield "prefill", f"{_n(p['engine_total'])} tokens computed, {_n(p['cached'])} from the cache"
        yield "", _parts(causes) or "no cause counted"
    if r := summary.get("reprefill"):
        yield "re-prefill", _reprefill(r)
        if r["coalesced"] or len(r["inflight"]) > 1:
            yield "", f"updates: {_parts(r['inflight'])}; coalesced: {_parts(r['coalesced']) or 'none'}"
    if (d := summary.get("redundancy")) and d["episodes"]:
        bias = f"trained ones are at most {_n(d['length_bias_at_most'], '.2f')} times as long as all"
        yield "redundant", f"{_n(d['episodes'])} episodes dropped with {_n(d['tokens'])} tokens; {bias}"
    for role, figures in (summary.get("roles") or {}).items():
        states = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in figures["states"].items() if seconds >= 0.05)
        yield role, f"busy {_n(figures['busy_ratio'], '.0%')}: {states}"
    if w := summary.get("weight_sync"):
        yield (
            "weight sync",
            f"{_n(w['updates'])} updates, {_n(w['bytes'])} bytes, {_n(w['transfer_seconds_mean'], '.3f')} s per transfer, "
            f"{_n(w['pause_seconds_mean'], '.3f')} s pause per load",
        )
    g = summary["logprob_gap"]
    yield (
        "log-prob gap",
        f"mean {_n(g['mean'], '.1e')}, max {_n(g['max'], '.1e')} nats over {_n(g['tokens'])} tokens; "
        f"of the probe after each load max {_n(g.get('probe_max'), '.1e')}",
    )
    for note in summary.get("notes") or []:
        yield "note", note


def _reprefill(r: Mapping[str, Any]) -> str:
    if not r["updates"]:
        return "no weight update of nodes at work"
    tokens, seconds = _n(r["tokens_per_update"], ",.0f"), _n(r["seconds_per_update"], ".3f")
    every = f"each weight update cost {tokens} re-prefilled tokens and {seconds} s of rollout time"
    whole = f"{_n(r['tokens'])} tokens, {_n(r['seconds'], '.1f')} s, {_n(r['rollout_share'], '.1%')} of it"
    return f"{every} ({_n(r['updates'])} updates: {whole})"


def _success(evals: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} training {_UNKNOWN}" if result is None else f"{name} training {result['success']:.3f} (n = {_n(result['n'])})"
        for name, result in evals.items()
    )


def _parts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_n(count)}" for name, count in counts.items() if count)


def _n(value: Any, form: str = ",") -> str:
    return _UNKNOWN if value is None else format(value, form)
