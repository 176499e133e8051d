"""Asynchronous against synchronous training where environments are slow: trained tokens per second of the same loop.

    python -m benchmarks.async_vs_sync [--json FILE] [--repeats 3] [--arms async sync] …

Each arm is a whole run of `segue train configs/latency.toml` with its processes on Ray, as a user would start it. The arms
alternate (async, sync, async, sync, …), and a pair shares its seed, so that both meet the same tasks with the same latencies.
They differ in `mode` alone: batch, group size, episodes in flight, nodes, slots and threads are those of the config.

What counts is the steady state, as metrics.jsonl has it: in async mode the first η + 1 steps fill the pipeline, and in the last
η + 2 no new group begins because no step would need it; both are left out. A synchronous step begins with nothing in flight, so
that one step at either end is enough. The rate from the same first step to the very last one is given beside it (`to_the_end`).

What a synchronous step cannot go below is the longest sum of latencies among its episodes: `slowest_episode_seconds`, drawn again
here from the same seeds, shows how much of `step_seconds` is that, and that sync mode wastes nothing else.

That environments are the bottleneck is measured, not assumed: at both ends of the window the benchmark scrapes `/metrics`. The
mean latency of environment steps must be at least 3 times the mean time that sampling an action takes, in every run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.command import Parser, ended, json_file
from benchmarks.figures import ROLES, Window, state_shares
from benchmarks.watched import Watched, scratch, train
from envpool.environment import Suite, Timed
from envpool.suites import load_suite
from scheduler.tasks import EpochSampler
from segue.config import Config, load_config
from segue.episode import Task
from segue.errors import RunFailed, UserError
from segue.metrics.samples import Scrape, difference, grown, quantile
from segue.metrics.vocabulary import is_idle
from segue.report import steps as step_lines

ARMS = ("async", "sync", "one_step_off")
STEPS = {"async": 24, "sync": 9, "one_step_off": 14}
"""Steps per run, so that the windows of the arms are about equally long."""
LATENCY_OVER_GENERATION = 3.0
"""What the mean latency of an environment step must at least be, in mean times of sampling an action."""
RUN_SECONDS = 600.0
CONFIG = Path(__file__).resolve().parent.parent / "configs" / "latency.toml"


def arm_figures(watched: Watched, window: Window) -> dict[str, Any]:
    """What one run reached inside its window."""
    before, after = watched.scrapes[window.warm], watched.scrapes[window.last]
    here = watched.lines[window.warm : window.last]
    ages = step_lines.age_histogram(here)
    durations = [line["step_seconds"] for line in here]
    grew = difference(before, after)
    generate, latency = turn_seconds(before, after)
    seconds = here[-1]["elapsed_seconds"] - watched.lines[window.warm - 1]["elapsed_seconds"]
    return {
        "tokens_per_second": rate(watched.lines, window.warm, window.last),
        "tokens_per_second_to_the_end": rate(watched.lines, window.warm, len(watched.lines)),
        "window": {"first_step": window.warm, "steps": len(here), "seconds": round(seconds, 3)},
        "step_seconds": {"mean": statistics.mean(durations), "median": statistics.median(durations), "max": max(durations)},
        "tokens_per_step": step_lines.total(here, "tokens_trained") / len(here),
        "tokens_masked_age": step_lines.total(here, "tokens_masked_age"),
        "staleness": {
            "bound": watched.summary["staleness"]["bound"],
            "mean": step_lines.age_mean(ages),
            "p99": step_lines.age_quantile(ages, 0.99),
            "max": step_lines.age_max(ages),
        },
        "env_step_seconds_mean": latency,
        "env_step_seconds_p50": quantile(grew, "envpool", "segue_env_step_seconds", 0.5),
        "env_step_seconds_p99": quantile(grew, "envpool", "segue_env_step_seconds", 0.99),
        "turn_generate_seconds_mean": generate,
        "latency_over_generation": latency / generate,
        "episodes_in_flight_mean": grown(before, after, "scheduler", "segue_episode_duration_seconds_sum") / seconds,
        "queue_groups_mean": statistics.mean(line["queue_groups"] for line in here),
        "idle_share": {role: idle_share(before, after, role) for role in ROLES},
        "state_share": {role: state_shares(before, after, role) for role in ROLES},
        "messages_per_second": grown(before, after, "scheduler", "segue_messages_received_total") / seconds,
        "episodes": watched.summary["episodes"],
        "notes": watched.summary["notes"],
    }


def rate(lines: Sequence[Mapping[str, Any]], warm: int, last: int) -> float:
    """Trained tokens per second from the end of step `warm` (a count: lines[warm − 1]) to the end of step `last`."""
    seconds: float = lines[last - 1]["elapsed_seconds"] - lines[warm - 1]["elapsed_seconds"]
    return step_lines.total(lines[warm:last], "tokens_trained") / seconds


def turn_seconds(before: Scrape, after: Scrape) -> tuple[float, float]:
    """Mean seconds per turn between two scrapes: sampling the action, and the environment's step. Raises `RunFailed`."""
    means = []
    for role, name in (("rollout", "segue_turn_generate_seconds"), ("envpool", "segue_env_step_seconds")):
        count = grown(before, after, role, f"{name}_count")
        if count <= 0:
            raise RunFailed(role, f"{name} observed nothing between the two scrapes: the window is too short.")
        means.append(grown(before, after, role, f"{name}_sum") / count)
    return means[0], means[1]


def idle_share(before: Scrape, after: Scrape, role: str) -> float:
    """The share of it spent waiting."""
    return sum(share for state, share in state_shares(before, after, role).items() if is_idle(state))


def slowest_episode(config: Config, steps: range) -> float:
    """Mean over steps of a synchronous run of the longest sum of environment latencies among the step's episodes, in seconds."""
    suite = load_suite(config.task.env, config.task.args)
    tasks = suite.tasks("train", config.task.train_tasks, config.seed)
    sampler = EpochSampler(len(tasks), config.seed, config.data.shuffle)
    order = itertools.chain.from_iterable(iter(sampler) for _ in itertools.count())
    floors = []
    for _ in range(steps.stop):
        batch = [tasks[index] for index in itertools.islice(order, config.batch.groups)]
        floors.append(max(latencies(suite, task, member) for task in batch for member in range(config.group.size)))
    return statistics.mean(floors[steps.start :])


def latencies(suite: Suite, task: Task, member: int) -> float:
    """How long the environment of one episode takes in all, reset and steps, whatever the actions; nothing is waited for."""
    environment = suite.make(task, member)
    assert isinstance(environment, Timed), f"the suite {suite.name} does not say how long it takes"
    environment.defer()
    environment.reset(task, task.seed)
    seconds, over = environment.owed(), False
    while not over:
        result = environment.step("")
        seconds += environment.owed()
        over = result.terminated or result.truncated
    return seconds


# --- over repeats -----------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarize(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The benchmark's figures from every arm's runs, in the order of their seeds. An arm's scalars are medians over its runs."""
    figures: dict[str, Any] = {}
    if "async" in runs and "sync" in runs:
        figures |= _against(runs["async"], runs["sync"], "")
    if "one_step_off" in runs and "sync" in runs:
        figures |= _against(runs["one_step_off"], runs["sync"], "one_step_off_")
    figures["latency_over_generation_min"] = min(run["latency_over_generation"] for arm in runs.values() for run in arm)
    figures["env_is_the_bottleneck"] = figures["latency_over_generation_min"] >= LATENCY_OVER_GENERATION
    for arm, arm_runs in runs.items():
        figures[arm] = {
            "tokens_per_second": statistics.median(run["tokens_per_second"] for run in arm_runs),
            "tokens_per_second_spread": spread([run["tokens_per_second"] for run in arm_runs]),
            "step_seconds": statistics.median(run["step_seconds"]["mean"] for run in arm_runs),
            "staleness_mean": statistics.median(run["staleness"]["mean"] for run in arm_runs),
            "staleness_max": max(run["staleness"]["max"] for run in arm_runs),
            "env_step_seconds_mean": statistics.median(run["env_step_seconds_mean"] for run in arm_runs),
            "turn_generate_seconds_mean": statistics.median(run["turn_generate_seconds_mean"] for run in arm_runs),
            "idle_share": {role: statistics.median(run["idle_share"][role] for run in arm_runs) for role in ROLES},
            "runs": list(arm_runs),
        }
    return figures


def _against(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, Any]:
    """The speed-up pair by pair: the runs of a pair met the same latencies."""
    pairs = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(ours, theirs, strict=True)]
    ends = [a["tokens_per_second_to_the_end"] / b["tokens_per_second_to_the_end"] for a, b in zip(ours, theirs, strict=True)]
    return {
        f"{prefix}speedup": statistics.median(pairs),
        f"{prefix}speedup_min": min(pairs),
        f"{prefix}speedup_max": max(pairs),
        f"{prefix}speedup_to_the_end": statistics.median(ends),
        f"{prefix}pairs": pairs,
    }


def setup(config: Config) -> dict[str, Any]:
    """What all arms share, as the resolved config has it."""
    rollout, pool = config.rollout, config.envpool
    return {
        "batch_groups": config.batch.groups,
        "group_size": config.group.size,
        "episodes_in_flight": rollout.nodes * rollout.max_episodes,
        "nodes": rollout.nodes,
        "slots": rollout.slots,
        "max_turn_tokens": rollout.max_turn_tokens,
        "threads": {"rollout": rollout.threads, "learner": config.learner.threads},
        "env_workers": pool.pools * pool.workers,
        "env": dict(config.task.args),
    }


# --- running ----------------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All runs, alternating; prints a line for each."""
    plans = {arm: _plan(args, arm) for arm in args.arms}
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in args.arms}
    for repeat in range(args.repeats):
        for arm, (config, window) in plans.items():
            overrides = [*_overrides(args, arm), f"seed={args.seed + repeat}"]
            watched = train(args.config, scratch / f"{arm}-{repeat}", overrides, {window.warm, window.last}, RUN_SECONDS)
            figures = arm_figures(watched, window) | {"seed": args.seed + repeat, "steps": config.steps}
            if arm == "sync" and config.task.env == "latency":
                drawn = config.model_copy(update={"seed": args.seed + repeat})
                figures["slowest_episode_seconds"] = slowest_episode(drawn, range(window.warm, window.last))
            runs[arm].append(figures)
            print(line(arm, repeat, figures), flush=True)
    shared = setup(plans[args.arms[0]][0])
    ages = {arm: config.staleness.max_age for arm, (config, _) in plans.items()}
    return {**summarize(runs), "setup": shared, "max_age": ages}


def _overrides(args: argparse.Namespace, arm: str) -> list[str]:
    steps = dict(args.steps or [])
    return [*args.overrides, f'mode="{arm}"', f"steps={steps.get(arm, STEPS[arm])}"]


def _plan(args: argparse.Namespace, arm: str) -> tuple[Config, Window]:
    config = load_config(args.config, _overrides(args, arm))
    return config, Window.of(config.steps, config.staleness.max_age)


def line(arm: str, repeat: int, figures: Mapping[str, Any]) -> str:
    """One run on the console."""
    idle = ", ".join(f"{role} {figures['idle_share'][role]:.0%}" for role in ROLES)
    age = figures["staleness"]
    return (
        f"{arm:>12} {repeat}: {figures['tokens_per_second']:7.1f} tokens/s in {figures['window']['steps']} steps of "
        f"{figures['step_seconds']['mean']:.2f} s, age {age['mean']:.2f}/{age['max']}, env step "
        f"{figures['env_step_seconds_mean']:.3f} s, action {figures['turn_generate_seconds_mean']:.3f} s "
        f"({figures['latency_over_generation']:.1f}×), idle: {idle}"
    )


def _steps(text: str) -> tuple[str, int]:
    arm, _, number = text.partition("=")
    if arm not in ARMS or not number.isdigit() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not ARM=STEPS, for instance sync=9")
    return arm, int(number)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("async-vs-sync", __doc__)
    parser.add_argument("--json", type=json_file, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=3, help="runs per arm")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["async", "sync"])
    parser.add_argument("--steps", nargs="+", type=_steps, metavar="ARM=N", help=f"steps of a run; default {STEPS}")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="for all arms")
    parser.add_argument("--seed", type=int, default=0, help="of the first pair; the next ones count up")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run directories here")
    args = parser.parse_args(arguments)
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    return args


def main() -> int:
    args = parse()
    where = result.machine()
    try:
        with scratch("async-vs-sync", args.keep) as folder:
            figures = measure(args, folder)
    except (RunFailed, UserError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    seeds = [args.seed + repeat for repeat in range(args.repeats)]
    packages = ("torch", "transformers", "ray")
    told = result.document("async_vs_sync", figures, seeds=seeds, arguments=vars(args), packages=packages, where=where)
    result.write(args.json, told)
    if "speedup" in figures:
        print(
            f"async trains {figures['speedup']:.2f} times the tokens per second of sync ({figures['speedup_min']:.2f} to "
            f"{figures['speedup_max']:.2f} over {args.repeats} pairs; {figures['speedup_to_the_end']:.2f} up to the last step)"
        )
    if note := result.busy(where):
        print(note)
    if not figures["env_is_the_bottleneck"]:
        print(
            f"An environment step took only {figures['latency_over_generation_min']:.1f} times as long as sampling an action in "
            f"one of the runs, and {LATENCY_OVER_GENERATION:g} are needed: run on a quiet machine, or raise task.args.mean.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
