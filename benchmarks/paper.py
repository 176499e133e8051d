"""Published results played in virtual time: what was published, what is reproduced, and Segue's best policy, side by side.

    python -m benchmarks.paper [--only NAME …] [--out DIR] [--jobs N] [--set KEY=VALUE …]

A row is a scenario file in benchmarks/scenarios/paper/ with its source, what the source leaves open, tolerance, and the arms
that stand for the published ones. All arms of a row run on the production scheduler with the same lengths and latencies.
Parameters are from the papers' text or stated as assumptions; none was searched for to match a result. Exit code 1: a row is
outside its tolerance and its file gives no reason. Arms are kept as they end: the same command goes on where one was cut short.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import paper_figures, paper_page, plots, result
from benchmarks.command import INTERRUPTED, Parser, ended, sentence
from benchmarks.jobs import each
from benchmarks.paper_figures import HEADINGS, NOT_PLAYED, reasons, row_document, table
from benchmarks.paper_rows import FOLDER, Played, Row, cost, load_row, load_rows, play_arm
from benchmarks.results_folder import PAGE, RESULTS, Kept, claimed, earlier, left, refuse_whole
from benchmarks.virtual.scenario import parse_sets
from segue.errors import DiskFailed, RunFailed, UserError
from segue.files import disk_errors, write_atomic


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser("paper", __doc__)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="rows: files of benchmarks/scenarios/paper/; default: all")
    out = "results, also of a call that was cut short: what they have is kept; default runs/bench-paper-TIME"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
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


def run(rows: Sequence[Row], jobs: int, out: Path) -> Generator[tuple[Row, Played], None, None]:
    """Every arm of every row, as it comes to its end; with several jobs the dearest begin first. Raises `RunFailed`."""
    work = [(row, arm) for row in rows for arm in row.paper.arms]
    if jobs > 1:
        work.sort(key=lambda item: -cost(*item))
    asked = [(row.path, row.overrides, arm.name, out) for row, arm in work]
    with contextlib.closing(each(_play, asked, jobs)) as playing:
        for place, played in playing:
            yield work[place][0], played


def _play(path: Path, overrides: Mapping[str, Any], arm: str, out: Path) -> Played:
    row = load_row(path, overrides)
    try:
        return Kept(out).of(f"{row.name}-{arm}", Played, partial(play_arm, row, row.arm(arm)))
    except DiskFailed:
        raise
    except RunFailed as error:
        raise RunFailed(error.part, f"{row.name}, {arm}: {error.sentence}") from error


def play(rows: Sequence[Row], jobs: int, out: Path, done: list[dict[str, Any]]) -> Generator[str, None, None]:
    """Play all rows and add each one's document to `done` once its arms are complete; yields what to say."""
    played: dict[str, dict[str, Played]] = {row.name: {} for row in rows}
    with contextlib.closing(run(rows, jobs, out)) as running:
        for row, arm in running:
            arms = played[row.name]
            arms[arm.arm] = arm
            yield f"{row.name}: {arm.arm}, step {arm.step_seconds:,.1f} s, {arm.cpu_seconds:.0f} s of CPU"
            if len(arms) == len(row.paper.arms):
                done.append(row_document(row, arms))
                done.sort(key=lambda document: (document["table"], document["name"]))
                yield ""


def digests() -> dict[str, str]:
    """Of every row's file: an edit is no commit."""
    return {path.stem: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in sorted(FOLDER.glob("*.toml"))}


def document(
    args: argparse.Namespace,
    where: Mapping[str, Any],
    rows: Sequence[Row],
    done: Sequence[dict[str, Any]],
    same: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything, as results.json has it."""
    told = [*done, *([NOT_PLAYED] if args.only is None else [])]
    told.sort(key=lambda row: str(row["table"]))
    missing = sorted({row.name for row in rows} - {row["name"] for row in done})
    figures: dict[str, Any] = {"title": "Published results, reproduced", "time": "virtual", "rows": told}
    figures |= {"missing": missing, "settings": dict(same)}
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
    out = args.out or Path("runs") / f"bench-paper-{time.strftime('%Y%m%d-%H%M%S')}"
    told: dict[str, Any] = {}
    done: list[dict[str, Any]] = []
    try:
        if args.jobs < 1:
            raise UserError(f"--jobs {args.jobs} is too low: give 1 or more.")
        rows = load_rows(args.only, parse_sets(args.overrides))
        plots.require()
        with claimed(out):
            same = {"versions": result.versions(), "set": list(args.overrides), "files": digests()}
            before = earlier(out, "paper", same, lambda found: [str(row["name"]) for row in found["rows"]]) or {"rows": []}
            done = [row for row in before["rows"] if "claims" in row]
            missing = [row for row in rows if row.name not in {row["name"] for row in done}]
            if not missing:
                refuse_whole(out)
            told = document(args, where, rows, done, same)
            _write(told, out)
            with contextlib.closing(play(missing, args.jobs, out, done)) as playing:
                for line in playing:
                    if line:
                        print(line, flush=True)
                    else:
                        told = document(args, where, rows, done, same)
                        _write(told, out)
    except (RunFailed, UserError) as error:
        print(sentence(error), file=sys.stderr)
        if told:
            print(_left(done, out), file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    except KeyboardInterrupt:
        print(f"Interrupted. {_left(done, out)}", file=sys.stderr)
        return INTERRUPTED
    print(text(told))
    print(f"{out}/{PAGE} has the table and plots, {out}/{RESULTS} everything.")
    return int(paper_figures.unexplained(told["rows"]) and not args.overrides)


def _write(told: Mapping[str, Any], out: Path) -> None:
    """results.json comes last: what it has is not drawn again by a later call. Raises `RunFailed` where the disk is full."""
    whole = [row["name"] for row in told["rows"] if "claims" in row]
    if whole:
        with disk_errors(out):
            drawn = paper_page.draw(told, out)
        write_atomic(out / PAGE, paper_page.build(told, drawn).encode())
    result.write(out / RESULTS, told)
    for name in whole:
        Kept(out).drop(f"{name}-*")


def _left(done: Sequence[Mapping[str, Any]], out: Path) -> str:
    """What there is of a call that was cut short."""
    return left(out, len(done), "row", len(Kept(out).names("*")), "arm")


if __name__ == "__main__":
    sys.exit(ended(main))
