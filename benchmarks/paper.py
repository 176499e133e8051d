"""Published results played in virtual time: what was published, what is reproduced, and Segue's best policy, side by side.

    python -m benchmarks.paper [--only NAME …] [--out DIR] [--jobs N] [--set KEY=VALUE …]

A row is a scenario file in benchmarks/scenarios/paper/ with its source, what the source leaves open, tolerance, and the arms
that stand for the published ones. All arms of a row run on the production scheduler with the same lengths and latencies.
Parameters are from the papers' text or stated as assumptions; none was searched for to match a result. Exit code 1: a row is
outside its tolerance and its file gives no reason.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import paper_figures, paper_page, plots, result
from benchmarks.paper_figures import HEADINGS, NOT_PLAYED, reasons, row_document, table
from benchmarks.paper_rows import Played, Row, cost, load_row, load_rows, play_arm
from benchmarks.sweep import claim
from segue.config import parse_overrides
from segue.errors import RunFailed, UserError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="rows: files of benchmarks/scenarios/paper/; default: all")
    parser.add_argument("--out", type=Path, metavar="DIR", help="results; default runs/bench-paper-TIME")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="arms played at once, a process each")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="over every row and arm: no published row then",
    )
    return parser


def run(rows: Sequence[Row], jobs: int) -> Iterator[tuple[Row, Played]]:
    """Every arm of every row, as it comes to its end; the dearest begin first. Raises `RunFailed`."""
    work = [(row, arm) for row in rows for arm in row.paper.arms]
    if jobs == 1:
        for row, arm in work:
            yield row, play_arm(row, arm)
        return
    work.sort(key=lambda item: -cost(*item))
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_play, row.path, row.overrides, arm.name): row for row, arm in work}
        try:
            for future in as_completed(futures):
                ended = future.result()
                if isinstance(ended, _Failed):
                    raise RunFailed(ended.part, ended.sentence)
                yield futures[future], ended
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class _Failed(NamedTuple):
    """A `RunFailed` on its way out of a process, which it cannot leave as itself: it takes two arguments and keeps one."""

    part: str
    sentence: str


def _play(path: Path, overrides: Mapping[str, Any], arm: str) -> Played | _Failed:
    """In a process of its own."""
    row = load_row(path, overrides)
    try:
        return play_arm(row, row.arm(arm))
    except RunFailed as error:
        return _Failed(error.part, f"{row.name}, {arm}: {error.sentence}")


def play(rows: Sequence[Row], jobs: int, done: list[dict[str, Any]]) -> Iterator[str]:
    """Play all rows and add each one's document to `done` once its arms are complete; yields what to say."""
    played: dict[str, dict[str, Played]] = {row.name: {} for row in rows}
    for row, arm in run(rows, jobs):
        arms = played[row.name]
        arms[arm.arm] = arm
        yield f"{row.name}: {arm.arm}, step {arm.step_seconds:,.1f} s, {arm.cpu_seconds:.0f} s of CPU"
        if len(arms) == len(row.paper.arms):
            done.append(row_document(row, arms))
            done.sort(key=lambda document: (document["table"], document["name"]))
            yield ""


def document(
    args: argparse.Namespace, where: Mapping[str, Any], rows: Sequence[Row], done: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Everything, as results.json has it."""
    told = [*done, *([NOT_PLAYED] if args.only is None else [])]
    told.sort(key=lambda row: str(row["table"]))
    figures = {"title": "Published results, reproduced", "time": "virtual", "rows": told}
    seeds = sorted({row.world.config.seed for row in rows})
    return result.document("paper", figures, seeds=seeds, arguments=vars(args), packages=("matplotlib",), where=where)


def text(told: Mapping[str, Any]) -> str:
    """The table and the reasons for the console."""
    lines = [list(HEADINGS), *table(told["rows"])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    for row in told["rows"]:
        shown += [f"{row['table']} {row['row']}: {reason}" for reason in reasons(row)]
    return "\n".join(shown)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    where = result.machine()
    done: list[dict[str, Any]] = []
    try:
        if args.jobs < 1:
            raise UserError(f"--jobs {args.jobs} is too low: give 1 or more.")
        rows = load_rows(args.only, parse_overrides(args.overrides))
        plots.require()
        out = args.out or Path("runs") / f"bench-paper-{time.strftime('%Y%m%d-%H%M%S')}"
        claim(out)
        told: dict[str, Any] = {}
        for line in play(rows, args.jobs, done):
            if line:
                print(line, flush=True)
            else:
                told = document(args, where, rows, done)
                result.write(out / "results.json", told)  # after every row: a long run may be stopped
        drawn = paper_page.draw(told, out)
        (out / "index.html").write_text(paper_page.build(told, drawn), encoding="utf-8")
    except (RunFailed, UserError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    except KeyboardInterrupt:
        print("Interrupted; results.json has the rows that were done.", file=sys.stderr)
        return 130
    print(text(told))
    print(f"{out}/index.html has the table and plots, {out}/results.json everything.")
    return int(paper_figures.unexplained(told["rows"]) and not args.overrides)


if __name__ == "__main__":
    sys.exit(main())
