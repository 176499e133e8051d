"""The staleness ablation: success on held-out tasks against the age of the tokens that were trained, for every correction.

    python -m benchmarks.learning [--results DIR] [--grid full|thin|AGES:CORRECTIONS …] [--seeds 3] [--jobs N] …

AReaL's table (arXiv 2505.24298; η against accuracy, naive and decoupled PPO) in small, on the quickstart task. A cell is a run of
`segue train configs/quickstart.toml --serial` in a process of one thread: the whole loop on a logical clock, in which every token
trains at an age of exactly η from batch η on (`learning_cells`; read from metrics.jsonl, and a cell where it was not so is thrown
away). All cells share everything but η, the correction and the seed, and train as many batches with the same learning rate.
η = 0 runs once per seed, because at age 0 all corrections are the same.

A cell's outcome is a file in the folder, renamed into place when it is whole: the command given again runs what is missing, also
with more seeds or a larger grid. A folder holds cells of one setting only. Success does not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.command import INTERRUPTED, Parser, ended, install, sentence
from benchmarks.learning_cells import (
    PACKAGES,
    PRESETS,
    Cell,
    Outcome,
    base_overrides,
    cell_overrides,
    cells_of,
    check_settings,
    load,
    read_grid,
    run_cell,
    save,
    settings_of,
)
from benchmarks.learning_figures import summarize, table
from benchmarks.learning_plot import plot
from benchmarks.results_folder import locked
from segue.config import load_config
from segue.errors import RunFailed, UserError
from segue.files import disk_errors, write_json

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "quickstart.toml"
SETTINGS, RESULTS = "settings.json", "results.json"
STEPS, LR, MINIBATCHES, EVAL_TASKS = 48, 3e-4, 2, 256

Run = Callable[[Cell], Outcome]


class Plan:
    """What is asked for: the cells, what they share, and the folder. Raises `UserError` for what cannot be run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.folder: Path = args.results
        self.config: Path = args.config
        grid = read_grid(args.grid)
        self.seeds = list(range(args.seed, args.seed + args.seeds))
        self.cells = cells_of(grid, self.seeds)
        own = load_config(args.config, args.overrides)
        oldest = max((age for age, _ in grid), default=0)
        if args.steps <= oldest:
            raise UserError(
                f"--steps {args.steps} leaves no step in which tokens have age {oldest}: raise --steps above {oldest}, or leave "
                f"{oldest} out of --grid."
            )
        self.shared = [*args.overrides, *base_overrides(own, args.steps, args.lr, args.minibatches, args.eval_tasks)]
        for cell in self.cells:  # every combination is checked before the first hour is spent
            load_config(args.config, [*self.shared, *cell_overrides(cell, own)])
        self.settings = settings_of(load_config(args.config, self.shared))

    def warm_start(self, seed: int) -> None:
        """Make the model of a seed before two of its cells would both do so."""
        from segue.cluster.warmstart import warmstart

        config = load_config(self.config, self.shared)
        config = load_config(self.config, [*self.shared, *cell_overrides(Cell(seed, 1, "decoupled"), config)])
        if config.warmstart is not None:
            warmstart(config, progress=False)


@contextlib.contextmanager
def opened(plan: Plan) -> Iterator[None]:
    """The folder, made if need be, ours alone, and of these settings. Raises `UserError`."""
    folder = plan.folder
    with locked(folder, "--results"):
        with disk_errors(folder):
            (folder / "cells").mkdir(exist_ok=True)
        file = folder / SETTINGS
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if any((folder / "cells").iterdir()):
                raise UserError(f"{folder} holds cells without their {SETTINGS}: name another folder with --results.") from None
            write_json(file, plan.settings)
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({error}): restore it, or name another folder with --results.") from None
        else:
            check_settings(known, json.loads(json.dumps(plan.settings)), folder)
        yield


def run_missing(
    cells: Sequence[Cell], folder: Path, run: Run, jobs: int, seconds: float, prepare: Callable[[int], None]
) -> tuple[dict[Cell, Outcome], dict[Cell, str]]:
    """Outcomes of all cells that are done, before or now, and why others failed. `jobs` run at once; after `seconds` none begins.

    `prepare(seed)` is called once, before the first cell of a seed.
    """

    def run_and_save(cell: Cell) -> Outcome:  # in its thread: a cell that ends while we are being interrupted is kept
        outcome = run(cell)
        save(folder, outcome)
        return outcome

    done: dict[Cell, Outcome] = {}
    for cell in cells:
        known = load(folder, cell)
        if known is not None:
            done[cell] = known
    pending = [cell for cell in cells if cell not in done]
    failed: dict[Cell, str] = {}
    prepared: set[int] = set()
    end = time.monotonic() + seconds
    running: dict[Future[Outcome], Cell] = {}
    print(f"{len(done)} of {len(cells)} cells are done, {len(pending)} to run, {jobs} at once.", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        while pending or running:
            while pending and len(running) < jobs and time.monotonic() < end:
                cell = pending.pop(0)
                if cell.seed not in prepared:
                    prepare(cell.seed)
                    prepared.add(cell.seed)
                running[pool.submit(run_and_save, cell)] = cell
            if not running:
                break
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                cell = running.pop(future)
                try:
                    done[cell] = future.result()
                except RunFailed as error:
                    failed[cell] = error.sentence
                    print(f"{cell.name} failed: {error.sentence}", file=sys.stderr, flush=True)
                else:
                    print(line(done[cell], len(done), len(cells)), flush=True)
    return done, failed


def line(outcome: Outcome, done: int, cells: int) -> str:
    """One cell on the console."""
    return f"{done:>3}/{cells} {outcome.cell.name:<24} success {outcome.success:.3f} of {outcome.n} in {outcome.seconds:.0f} s"


def measure(args: argparse.Namespace, plan: Plan, scratch: Path) -> tuple[dict[str, Any], int]:
    """Run what is missing; the figures of everything that is there, and the exit code: 1 if a cell failed."""

    def run(cell: Cell) -> Outcome:
        folder = scratch / cell.name
        shutil.rmtree(folder, ignore_errors=True)  # of a call that was cut short, with --keep
        outcome = run_cell(plan.config, plan.shared, cell, folder)
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
        return outcome

    seconds = 60.0 * args.budget_minutes
    done, failed = run_missing(plan.cells, plan.folder, run, args.jobs, seconds, plan.warm_start)
    missing = [cell.name for cell in plan.cells if cell not in done]
    figures = summarize(done.values()) | {
        "missing": missing,
        "failed": {cell.name: why for cell, why in failed.items()},
        "full_grid": set(read_grid(["full"])) <= {(cell.age, cell.correction) for cell in plan.cells},
        "settings": plan.settings,
    }
    return figures, 1 if failed else 0


def report(figures: Mapping[str, Any]) -> None:
    """The table, what it decides, and what it does not cover."""
    print(table(figures))
    for name, said in figures["corrected_at_4"].items():
        print(f"η = 4, {name}: {said} (within ± {figures['margin']:g} of synchronous)")
    for age, worse in figures["naive_worse_from_8"].items():
        said = {True: "clearly worse than synchronous", False: "not clearly worse than synchronous", None: "no interval yet"}[
            worse
        ]
        print(f"η = {age}, no correction: {said}")
    if not figures["full_grid"]:
        print("The grid is thinned: not all ages and corrections were asked for.")
    if figures["missing"]:
        names = figures["missing"]
        print(
            f"Missing: {len(names)} cells ({', '.join(names[:6])}{', …' if len(names) > 6 else ''}); the same command runs them."
        )


# --- the command ------------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("learning", __doc__)
    parser.add_argument("--results", type=Path, default=Path("runs/learning"), metavar="DIR", help="cells, results.json, plots")
    grids = f"{', '.join(PRESETS)}, or items such as 4,8:none,decoupled and 16:all; η = 0 is always there"
    parser.add_argument("--grid", nargs="+", default=["full"], metavar="GRID", help=grids)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--steps", type=int, default=STEPS, help="batches that every cell trains")
    parser.add_argument("--lr", type=float, default=LR, help="learning rate of all cells")
    parser.add_argument("--minibatches", type=int, default=MINIBATCHES, help="optimizer steps per batch; loglinear needs 2")
    parser.add_argument("--eval-tasks", type=int, default=EVAL_TASKS, help="held-out tasks at the end")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="cells at once, a core each")
    parser.add_argument("--budget-minutes", type=float, default=float("inf"), help="begin no cell after so long")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="for all cells")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run directories here")
    args = parser.parse_args(arguments)
    for name in ("seeds", "steps", "jobs", "eval_tasks"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not args.budget_minutes > 0:
        parser.error("--budget-minutes must be above 0")
    return args


def main() -> int:
    args = parse()
    where = result.machine()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the cells' processes: as many run at once as there are cores
    scratch = args.keep or Path(tempfile.mkdtemp(prefix="segue-learning-"))
    try:
        plan = Plan(args)
        with opened(plan):
            figures, code = measure(args, plan, scratch)
            arguments = {**vars(args), "budget_minutes": str(args.budget_minutes)}
            told = result.document("learning", figures, seeds=plan.seeds, arguments=arguments, packages=PACKAGES, where=where)
            result.write(plan.folder / RESULTS, told)
            report(figures)
            with disk_errors(plan.folder):
                plots = plot(figures, plan.folder)
            print(f"Written: {', '.join(map(str, [plan.folder / RESULTS, *plots]))}.")
            if not plots:
                print(f"There is no plot, because matplotlib is not installed: {install('plots')}, and give the command again.")
        return code
    except (RunFailed, UserError) as error:
        print(sentence(error), file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    except KeyboardInterrupt:
        if args.keep is None:
            shutil.rmtree(scratch, ignore_errors=True)
        print(f"Interrupted: cells that were done are in {args.results}; the same command goes on.", file=sys.stderr)
        return INTERRUPTED
    finally:
        with contextlib.suppress(OSError):
            scratch.rmdir()  # what it holds are cells that failed, whose logs were named


if __name__ == "__main__":
    sys.exit(ended(main))
