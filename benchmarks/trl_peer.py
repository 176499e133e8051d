"""Segue and TRL side by side: trained tokens per second of the same policy on the same environment, with and without latency.

    python -m benchmarks.trl_peer [--json FILE] [--repeats 3] [--steps segue=24 trl=12] [--means 0 0.3] [--threads N] …

Both train the model of configs/peers.toml on the suite `latency`, from the same weights, with the same batch, group size,
lengths, learning rate and loss, on the same cores of one machine, in turns (Segue, TRL, Segue, …); a pair shares its seed, and
with it tasks and latencies. Segue runs as a user starts it, its processes on Ray; TRL in a process of its own
(`benchmarks.trl_worker`), whose torch uses `--threads`: measure with one and with all cores, and believe the smaller ratio.
docs/benchmarks.md says what could not be made the same.

Exit code 1: a run failed, or Segue is not as many times as fast as claimed: 3 with latency, 1 without.

TRL comes with the extra `peers` of pyproject.toml (`.venv/bin/pip install -e '.[peers]'`), or from any folder on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import children, result
from benchmarks.async_vs_sync import rate, setup, spread
from benchmarks.command import Parser, ended, install, json_file
from benchmarks.figures import Window
from benchmarks.trl_worker import STEPS_FILE
from benchmarks.watched import scratch, train
from segue.cluster.prepare import find_model
from segue.config import Config, load_config, to_toml
from segue.errors import RunFailed, UserError
from segue.files import read_jsonl

NEEDED = ("trl", "datasets", "pyarrow", "accelerate")
STEPS = {"segue": 24, "trl": 12}
WARM = 2
"""Steps of TRL that do not count: the first ones allocate."""
CLAIMS = {"with_latency": 3.0, "without_latency": 1.0}
RUN_SECONDS = 900.0
CONFIG = Path(__file__).resolve().parent.parent / "configs" / "peers.toml"


def check_installed() -> None:
    """Raises `UserError` unless TRL and what it needs can be imported."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"This benchmark trains with TRL, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: "
            f"{install('peers')}, or install trl==1.16.0 into a folder and put that on PYTHONPATH."
        )


def train_with_trl(job: Mapping[str, Any], seconds: float = RUN_SECONDS) -> list[dict[str, Any]]:
    """One run of TRL; a line per step. Raises `RunFailed` when it fails or is late."""
    file = Path(job["folder"]) / "job.json"
    file.write_text(json.dumps(job), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = children.run([sys.executable, "-m", "benchmarks.trl_worker", str(file)], seconds, env=environment)
    lines = read_jsonl(Path(job["folder"]) / STEPS_FILE)
    if ended.code != 0 or ended.late or len(lines) != job["steps"]:
        words = "\n".join(ended.last)
        raise RunFailed("trl", f"{words}\nTRL {ended.why(seconds)} after {len(lines)} steps: its last words are above.")
    return lines


def trl_figures(lines: Sequence[Mapping[str, Any]], warm: int = WARM) -> dict[str, float]:
    """Rates from the end of step `warm` to the end of the last one."""
    here = lines[warm:]
    seconds = lines[-1]["seconds"] - lines[warm - 1]["seconds"]
    tokens = sum(line["tokens"] for line in here)
    return {
        "tokens_per_second": tokens / seconds,
        "steps_per_second": len(here) / seconds,
        "tokens_per_step": tokens / len(here),
        "reward_last": lines[-1]["reward"],
    }


def segue_figures(lines: Sequence[Mapping[str, Any]], window: Window) -> dict[str, float]:
    """The same of a run of Segue in its window of steady state, from metrics.jsonl."""
    here = lines[window.warm : window.last]
    seconds = here[-1]["elapsed_seconds"] - lines[window.warm - 1]["elapsed_seconds"]
    return {
        "tokens_per_second": rate(lines, window.warm, window.last),
        "tokens_per_second_to_the_end": rate(lines, window.warm, len(lines)),
        "steps_per_second": len(here) / seconds,
        "tokens_per_step": sum(line["tokens_trained"] for line in here) / len(here),
        "reward_last": lines[-1]["reward_mean"],
    }


def summarize(pairs: Mapping[float, Sequence[Mapping[str, Mapping[str, float]]]]) -> dict[str, Any]:
    """By mean latency: Segue's trained tokens per second over TRL's, pair by pair; and whether the claims hold."""
    points: list[dict[str, Any]] = []
    for mean, runs in pairs.items():
        ratios = [run["segue"]["tokens_per_second"] / run["trl"]["tokens_per_second"] for run in runs]
        kind = "with_latency" if mean > 0.0 else "without_latency"
        point: dict[str, Any] = {"mean_seconds": mean, "kind": kind, "ratio": statistics.median(ratios), "ratios": ratios}
        point["needed"], point["holds"] = CLAIMS[kind], statistics.median(ratios) >= CLAIMS[kind]
        for arm in ("segue", "trl"):
            point[arm] = {
                "tokens_per_second": spread([run[arm]["tokens_per_second"] for run in runs]),
                "steps_per_second": statistics.median(run[arm]["steps_per_second"] for run in runs),
                "runs": [dict(run[arm]) for run in runs],
            }
        points.append(point)
    return {"points": points}


# --- running --------------------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All runs, in turns; prints a line for each."""
    pairs: dict[float, list[dict[str, dict[str, float]]]] = {mean: [] for mean in args.means}
    for repeat in range(args.repeats):
        for mean in args.means:
            overrides = _overrides(args, mean, args.seed + repeat)
            config = load_config(args.config, overrides)
            name = f"{repeat}-{mean:g}"
            watched = train(args.config, scratch / f"segue-{name}", overrides, (), RUN_SECONDS)
            ours = segue_figures(watched.lines, Window.of(config.steps, config.staleness.max_age))
            print(line("segue", mean, repeat, ours), flush=True)
            theirs = trl_figures(train_with_trl(_job(args, config, scratch / f"trl-{name}")))
            print(line("trl", mean, repeat, theirs), flush=True)
            pairs[mean].append({"segue": ours, "trl": theirs})
    config = load_config(args.config, _overrides(args, args.means[0], args.seed))
    shared = setup(config) | {"trl_threads": args.threads, "learning_rate": config.learner.lr}
    return {**summarize(pairs), "setup": shared, "trl": importlib.metadata.version("trl")}


def _overrides(args: argparse.Namespace, mean: float, seed: int) -> list[str]:
    fixed = [f"task.args.mean={float(mean)}", f"seed={seed}", f"steps={dict(args.steps)['segue']}", "eval.tasks=0"]
    return [*args.overrides, *fixed]


def _job(args: argparse.Namespace, config: Config, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    steps = dict(args.steps)["trl"]
    model = find_model(config)
    return {"config": to_toml(config), "model": model, "steps": steps, "threads": args.threads, "folder": str(folder)}


def line(arm: str, mean: float, repeat: int, figures: Mapping[str, float]) -> str:
    """One run on the console."""
    return (
        f"{arm:>6} {repeat}, env step {mean:.2f} s: {figures['tokens_per_second']:8.1f} tokens/s, "
        f"{figures['steps_per_second']:6.3f} steps/s of {figures['tokens_per_step']:.0f} tokens"
    )


def _steps(text: str) -> tuple[str, int]:
    arm, _, number = text.partition("=")
    if arm not in STEPS or not number.isdigit() or int(number) <= (WARM if arm == "trl" else 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not ARM=STEPS, for instance segue=24 or trl=12 (more than {WARM})")
    return arm, int(number)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("trl-peer", __doc__)
    parser.add_argument("--json", type=json_file, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=3, help="pairs per latency")
    parser.add_argument("--steps", nargs="+", type=_steps, metavar="ARM=N", default=[], help=f"steps of a run; default {STEPS}")
    parser.add_argument("--means", nargs="+", type=float, help="mean seconds of an environment step; default 0 and the config's")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of TRL (default 1, as Segue's processes)")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="for both")
    parser.add_argument("--seed", type=int, default=0, help="of the first pair; the next ones count up")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run directories here")
    args = parser.parse_args(arguments)
    args.steps = list((STEPS | dict(args.steps)).items())
    if args.repeats < 1 or args.threads < 1:
        parser.error("--repeats and --threads must be at least 1")
    return args


def check(args: argparse.Namespace) -> None:
    """What can be found wrong before anything starts. Raises `UserError`."""
    config = load_config(args.config, list(args.overrides))
    if config.task.env != "latency":
        raise UserError(
            f"{args.config} trains on {config.task.env}: both latencies need the suite latency, as configs/latency.toml."
        )
    if args.means is None:
        args.means = [0.0, float(config.task.args.get("mean", 0.0))]
    if any(mean < 0.0 for mean in args.means) or len(set(args.means)) != len(args.means):
        raise UserError(f"--means {' '.join(f'{mean:g}' for mean in args.means)}: name different numbers of seconds, 0 or more.")
    Window.of(dict(args.steps)["segue"], config.staleness.max_age)
    check_installed()


def main() -> int:
    where = result.machine()
    try:
        args = parse()
        check(args)
        with scratch("trl", args.keep) as folder:
            figures = measure(args, folder)
    except (RunFailed, UserError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    seeds = [args.seed + repeat for repeat in range(args.repeats)]
    packages = ("torch", "transformers", "ray", "trl", "datasets", "accelerate")
    told = result.document("trl_peer", figures, seeds=seeds, arguments=vars(args), packages=packages, where=where)
    result.write(args.json, told)
    for point in figures["points"]:
        verdict = "as claimed" if point["holds"] else "NOT as claimed"
        print(
            f"env step {point['mean_seconds']:.2f} s: Segue trains {point['ratio']:.2f} times the tokens per second of TRL "
            f"({min(point['ratios']):.2f} to {max(point['ratios']):.2f} over {len(point['ratios'])} pairs), {verdict}: "
            f"at least {point['needed']:g} times"
        )
    if note := result.busy(where):
        print(note)
    return 0 if all(point["holds"] for point in figures["points"]) else 1


if __name__ == "__main__":
    sys.exit(ended(main))
