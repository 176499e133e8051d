"""Where a real run's time goes: CPU seconds of every process, states of every role, phases inside learner, node and update.

    python -m benchmarks.profile [CONFIG] [--set KEY=VALUE …] [--functions] [--json FILE] [--keep DIR]

One run of `segue train CONFIG` (the quickstart by default), its processes on Ray, as a user would start it, without evaluations.

- CPU seconds of each process of the run: until all roles run, in the window of steady state, and in all. They are what to judge a
  change by: wall time depends on who else uses the machine, and where all processes share a few cores, each one's CPU time is
  taken from the others.
- States: the share of the window that each role's processes (env pools: slots) spent in each (docs/metrics.md).
- Phases: seconds per step of the window, summed over a role's processes, from the histograms and counters that roles export in
  any run: `segue_learner_step_seconds`, `segue_engine_seconds_total`, `segue_exchange_seconds`, `segue_weight_sync_seconds`.
  They are wall time: two threads that want the same core both spend it.
- `--functions` samples the stacks of each role's process (`segue.stacks`; some per cent slower) and lists the functions that its
  CPU time went into while it trained. The sampler's own time is in the process's.

The window is that of the other benchmarks: without the steps that fill and empty the pipeline.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.command import Parser, ended, json_file
from benchmarks.cpu import CpuWatch, Process
from benchmarks.figures import ROLES, Window, state_shares
from benchmarks.watched import Watched, scratch, steps_done, train
from segue.config import Config, load_config
from segue.errors import RunFailed, UserError
from segue.metrics.samples import Scrape, grown
from segue.metrics.vocabulary import ENGINE_PHASES, LEARNER_PHASES, SYNC_PHASES
from segue.report import steps as step_lines

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "quickstart.toml"
RUN_SECONDS = 900.0
LEAST = 5
"""Steps of a window that says something: of one or two, chance decides what falls into them."""
NO_EVALS = "eval.tasks=0"
_RUNS = re.compile(r"all \d+ roles run ")


class Moments:
    """CPU seconds when the roles ran, and when marked steps were trained. `heard` is `watched.train`'s."""

    def __init__(self, run: Path, marks: Sequence[int]) -> None:
        self._run = run
        self._marks = marks
        self.watch: CpuWatch | None = None
        self.started: dict[Process, float] = {}
        self.at: dict[int, dict[Process, float]] = {}

    def heard(self, pid: int, line: str) -> None:
        if self.watch is None:
            self.watch = CpuWatch(pid)
        if _RUNS.match(line):
            self.started = self.watch.read()
            self.watch.name_targets(self._run)
        elif (done := steps_done(line)) in self._marks:
            self.at[done] = self.watch.read()


def profile(config: Config, path: Path, run: Path, overrides: Sequence[str], functions: bool) -> dict[str, Any]:
    """One run, and where its time went. Raises `RunFailed`, `UserError`."""
    window = Window.of(config.steps, config.staleness.max_age, LEAST)
    marks = (window.warm, window.last)
    moments = Moments(run, marks)
    settings = [*overrides, *(["cluster.sample_stacks=true"] if functions else [])]
    try:
        watched = train(path, run, settings, marks, RUN_SECONDS, heard=moments.heard)
    finally:
        if moments.watch is not None:
            moments.watch.close()
    assert moments.watch is not None, "a run that trained has printed lines"
    found = figures(watched, window)
    found["cpu"] = cpu_figures(moments, window)
    found["cpu_seconds_per_step"] = sum(row["window"] for row in found["cpu"].values()) / found["window"]["steps"]
    if functions:
        found["functions"] = {file.stem: read_functions(file) for file in sorted((run / "profile").glob("*.json"))}
    return found


def figures(watched: Watched, window: Window) -> dict[str, Any]:
    """States and phases of the window."""
    before, after = watched.scrapes[window.warm], watched.scrapes[window.last]
    here = watched.lines[window.warm : window.last]
    seconds = here[-1]["elapsed_seconds"] - watched.lines[window.warm - 1]["elapsed_seconds"]
    return {
        "window": {"first_step": window.warm, "steps": len(here), "seconds": round(seconds, 3)},
        "tokens_trained": step_lines.total(here, "tokens_trained"),
        "tokens_per_second": step_lines.total(here, "tokens_trained") / seconds,
        "states": {role: state_shares(before, after, role) for role in ROLES},
        "phases": phases(before, after, len(here)),
        "messages_per_step": {role: grown(before, after, role, "segue_messages_received_total") / len(here) for role in ROLES},
    }


def phases(before: Scrape, after: Scrape, steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """By part of the system and phase: seconds per step, summed over processes, and how often it happened per step."""

    def timed(role: str, name: str, names: Sequence[str]) -> dict[str, dict[str, float]]:
        found = {}
        for phase in names:
            count = grown(before, after, role, f"{name}_count", phase=phase)
            if count > 0:
                spent = grown(before, after, role, f"{name}_sum", phase=phase)
                found[phase] = {"seconds": spent / steps, "times": count / steps}
        return found

    engine = {
        phase: {"seconds": grown(before, after, "rollout", "segue_engine_seconds_total", phase=phase) / steps}
        for phase in ENGINE_PHASES
    }
    exchange = {
        "exchange": {
            "seconds": grown(before, after, "rollout", "segue_exchange_seconds_sum") / steps,
            "times": grown(before, after, "rollout", "segue_exchange_seconds_count") / steps,
        }
    }
    return {
        "learner": timed("learner", "segue_learner_step_seconds", LEARNER_PHASES),
        "rollout": engine | exchange,
        "update": timed("weightsync", "segue_weight_sync_seconds", SYNC_PHASES),
    }


def cpu_figures(moments: Moments, window: Window) -> dict[str, dict[str, float]]:
    """By process: CPU seconds until all roles ran (`start`), in the `window`, and in the `whole` run."""
    watch = moments.watch
    assert watch is not None
    parts = {
        "start": watch.between({}, moments.started),
        "window": watch.between(moments.at[window.warm], moments.at[window.last]),
        "whole": watch.between({}, watch.read()),
    }
    return {name: {part: round(parts[part].get(name, 0.0), 3) for part in parts} for name in sorted(parts["whole"])}


def read_functions(file: Path) -> dict[str, Any]:
    """What a process sampled while the run went on."""
    sections: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["sections"]
    return sections.get("run", {})


# --- what people see ----------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Any], top: int) -> str:
    """The figures as text."""
    window, cpu = found["window"], found["cpu"]
    steps = window["steps"]
    lines = [
        f"Window: {steps} steps in {window['seconds']:.1f} s, {found['tokens_trained']:,.0f} tokens trained "
        f"({found['tokens_per_second']:,.0f} per second)",
        "",
        f"{'CPU seconds':<24}{'start':>8}{'window':>9}{'per step':>10}{'whole':>9}",
    ]
    for name, row in sorted(cpu.items(), key=lambda item: -item[1]["whole"]):
        lines.append(f"{name:<24}{row['start']:>8.2f}{row['window']:>9.2f}{row['window'] / steps:>10.3f}{row['whole']:>9.2f}")
    start, inside, whole = (sum(row[part] for row in cpu.values()) for part in ("start", "window", "whole"))
    lines += [f"{'all':<24}{start:>8.2f}{inside:>9.2f}{inside / steps:>10.3f}{whole:>9.2f}", "", "Share of the window by state"]
    for role, states in found["states"].items():
        told = ", ".join(f"{state} {share:.1%}" for state, share in sorted(states.items(), key=lambda item: -item[1]) if share)
        lines.append(f"  {role:<10} {told}")
    received = ", ".join(f"{role} {count:.0f}" for role, count in found["messages_per_step"].items())
    lines += ["", f"Calls received over Ray per step: {received}"]
    for part, rows in found["phases"].items():
        lines += ["", f"{part}, seconds per step by phase"]
        for phase, row in rows.items():
            times = f"   {row['times']:.1f} times" if "times" in row else ""
            lines.append(f"  {phase:<18}{row['seconds']:>9.4f}{times}")
    for process, sampled in found.get("functions", {}).items():
        lines += ["", f"{process}: functions by own CPU seconds, of {sampled.get('cpu_seconds', 0.0):.2f}"]
        lines += [f"  {row['seconds']:>8.2f}  {row['file']}  {row['function']}" for row in sampled.get("self", [])[:top]]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("profile", __doc__)
    parser.add_argument("config", type=Path, nargs="?", default=CONFIG, help="of the run (default: the quickstart)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key, as for segue train")
    parser.add_argument("--functions", action="store_true", help="sample the stacks of each role's process")
    parser.add_argument("--top", type=int, default=15, help="functions shown per process (default 15)")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="write the figures there")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run's directory there")
    args = parser.parse_args(arguments)
    if args.top < 1:
        raise UserError(f"--top {args.top} shows no function: use 1 or more.")
    return args


def main() -> int:
    try:
        args = parse()
        overrides = [NO_EVALS, *args.set]
        config = load_config(args.config, overrides)
        Window.of(config.steps, config.staleness.max_age, LEAST)  # before anything is started
        where = result.machine()
        with scratch("profile") as folder:
            run = args.keep if args.keep is not None else folder / "run"
            found = profile(config, args.config, run, overrides, args.functions)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except RunFailed as failure:
        print(f"{failure.part}: {failure.sentence}", file=sys.stderr)
        return 1
    print(table(found, args.top))
    if args.json is None:
        print("\nNothing was saved: --json FILE keeps the figures.")
    packages = ("torch", "transformers", "ray")
    result.write(
        args.json, result.document("profile", found, seeds=[config.seed], arguments=vars(args), packages=packages, where=where)
    )
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
