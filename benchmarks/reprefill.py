"""What weight updates cost in re-prefilled tokens: the closed form of docs/reprefill.md against whole runs.

    python -m benchmarks.reprefill [--json FILE] [--workloads short spread heavy] [--engine embedded]
    python -m benchmarks.reprefill --workloads shared waits     where the closed form needs a correction
    python -m benchmarks.reprefill --policy [--repeats 1]       update.policy: every against budget

Each workload is a run of `segue train configs/latency.toml` with all its processes, as a user would start it, with other
lengths, concurrency and batch. KV is dropped at every update (`recompute`). Between two steps of the run the benchmark reads
what the nodes export: context tokens computed again because of updates, per trained token. The prediction is made of what the
same window says about its workload, and nothing is fitted: episodes under way C, between their first and their last token (the
time that all of them together sampled, over the window without its pauses, and waited between turns, over the window); trained
episodes per update B; and, from the learner's batches, prompt P, length L after it, its coefficient of variation and the part of
it that was sampled.

A workload passes if measured over predicted is within 10 % of 1. `shared` and `waits` break an assumption each; for them the
ratio to the corrected prediction is what is judged.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.command import Parser, ended, json_file, positive
from benchmarks.watched import Watched, scratch, train
from segue.config import load_config
from segue.errors import RunFailed, UserError
from segue.metrics.samples import grown
from segue.metrics.vocabulary import PREFILL_CAUSES

TOLERANCE = 0.10
RUN_SECONDS = 900.0
POLICY_SECONDS = 3600.0
CONFIGS = Path(__file__).resolve().parent.parent / "configs"
WARM = 10
"""Steps before the window: episodes that began together have drifted apart by then."""


@dataclass(frozen=True)
class Workload:
    """A run: `steps` in all, of which the last η + 2 are outside of the window; `overrides` over COMMON."""

    what: str
    steps: int
    places: int
    groups: int
    overrides: Mapping[str, Any] = field(default_factory=dict)


COMMON: dict[str, Any] = {
    "task.args.distribution": "constant",
    "task.args.mean": 0.01,
    "group.size": 1,
    "learner.advantage": "reinforce",
    "staleness.max_age": 8,
    "data.prefetch": 1,
    "rollout.nodes": 1,
    "rollout.max_turn_tokens": 80,
    "rollout.max_turns": 16,
    "rollout.max_tokens": 2048,
    "learner.lr": 1e-6,
    "envpool.workers": 1,
    "envpool.instances": 64,
}
WORKLOADS = {
    "short": Workload(
        "lengths close together, short prompts, C/B about 1.5",
        steps=50,
        places=24,
        groups=16,
        overrides={"task.args.turns_min": 3, "task.args.turns_max": 6, "task.args.prompt_words": 10},
    ),
    "spread": Workload(
        "lengths spread evenly, long prompts, C/B about 3",
        steps=70,
        places=24,
        groups=8,
        overrides={"task.args.turns_min": 1, "task.args.turns_max": 9, "task.args.prompt_words": 120},
    ),
    "heavy": Workload(
        "a heavy tail of lengths, C/B about 1",
        steps=50,
        places=16,
        groups=16,
        overrides={
            "task.args.turns_min": 1,
            "task.args.turns_max": 16,
            "task.args.turns_mean": 4.0,
            "task.args.prompt_words": 40,
        },
    ),
    "shared": Workload(
        "groups of 8 share a long prompt",
        steps=50,
        places=24,
        groups=2,
        overrides={
            "group.size": 8,
            "learner.advantage": "grpo",
            "task.args.turns_min": 2,
            "task.args.turns_max": 6,
            "task.args.prompt_words": 120,
        },
    ),
    "waits": Workload(
        "environments take longer than the interval of updates",
        steps=100,
        places=48,
        groups=4,
        overrides={
            "staleness.max_age": 16,
            "task.args.distribution": "lognormal",  # waits of one length would keep episodes in step with one another
            "task.args.mean": 4.0,
            "task.args.spread": 0.7,
            "envpool.step_seconds": 60.0,
            "task.args.turns_min": 2,
            "task.args.turns_max": 4,
            "rollout.max_turn_tokens": 40,
            "task.args.prompt_words": 10,
        },
    ),
}
THREE = ("short", "spread", "heavy")
BROKEN = ("shared", "waits")


def predicted(*, concurrent: float, per_update: float, cv: float, prompt: float, length: float, sampled: float) -> float:
    """Re-prefilled tokens per trained token, if every update drops all KV (docs/reprefill.md).

    φ = (C/B) · [(1 + cv²)/2 + P/E[L]] · E[L]/E[sampled]; `sampled` are trained tokens per episode.
    """
    return concurrent / per_update * ((1 + cv**2) / 2 + prompt / length) * length / sampled


def hit(wait: float, gaps: Sequence[float]) -> float:
    """The probability that an update falls into a wait that begins at any time, with updates `gaps` seconds apart."""
    return 1.0 - sum(max(0.0, gap - wait) for gap in gaps) / sum(gaps)


def figures(watched: Watched, first: int, last: int, group: int, nodes: int) -> dict[str, Any]:
    """What the window (`first`, `last`] of steps says: measured, predicted, and what the prediction was made of."""
    before, after = watched.scrapes[first], watched.scrapes[last]
    here = watched.lines[first:last]
    seconds = here[-1]["elapsed_seconds"] - watched.lines[first - 1]["elapsed_seconds"]
    episodes = sum(line["trajectories_trained"] for line in here)
    weights = [line["trajectories"] for line in here]

    def mean(key: str) -> float:
        return float(sum(line[key] * n for line, n in zip(here, weights, strict=True)) / sum(weights))

    trained = sum(line["tokens_trained"] for line in here)
    updates = here[-1]["updates"] - watched.lines[first - 1]["updates"]
    length, prompt = mean("after_prompt_tokens"), mean("prompt_tokens")
    cv = math.sqrt(max(0.0, mean("after_prompt_tokens_squared") / length**2 - 1))
    generating = grown(before, after, "rollout", "segue_turn_generate_seconds_sum")
    turns = grown(before, after, "rollout", "segue_turn_generate_seconds_count")
    waits = grown(before, after, "envpool", "segue_env_step_seconds_sum")
    ended = grown(before, after, "scheduler", "segue_episode_duration_seconds_count")
    between = waits * (1 - ended / turns)  # the last one of an episode leads nowhere
    closed = grown(before, after, "rollout", "segue_worker_state_seconds_total", state="wait_weights") / nodes
    sampling = generating / (seconds - closed)
    concurrent = sampling + between / seconds
    # Where environments take long: the waits that end between two updates, each paid once if an update fell into it.
    paying = sampling + (turns - ended) / updates * hit(waits / turns, [line["step_seconds"] for line in here])
    made_of = {
        "concurrent": concurrent,
        "per_update": episodes / updates,
        "cv": cv,
        "prompt": prompt,
        "length": length,
        "sampled": trained / episodes,
    }
    again = grown(before, after, "rollout", "segue_prefill_tokens_total", cause="weight_update")
    phi, measured = predicted(**made_of), again / trained
    corrected = predicted(**{**made_of, "prompt": prompt / group, "concurrent": min(concurrent, paying)})
    return {
        "predicted": phi,
        "measured": measured,
        "ratio": measured / phi,
        "corrected": corrected,
        "ratio_corrected": measured / corrected,
        "made_of": made_of,
        "c_over_b": concurrent / made_of["per_update"],
        "window": {"first_step": first, "steps": last - first, "seconds": seconds, "updates": updates},
        "tokens": {cause: grown(before, after, "rollout", "segue_prefill_tokens_total", cause=cause) for cause in PREFILL_CAUSES},
        "reprefill_seconds": grown(before, after, "rollout", "segue_prefill_seconds_total", cause="weight_update"),
        "trained_tokens": trained,
        "masked_age": sum(line["tokens_masked_age"] for line in here),
        "leased": grown(before, after, "scheduler", "segue_episode_duration_seconds_sum") / seconds,
        "sampling": sampling,
        "paying": paying,
        "closed_seconds": closed,
        "turns": turns / ended,
        "turn_generate_seconds": generating / turns,
        "env_step_seconds": waits / turns,
        "update_interval_seconds": seconds / updates,
        "coalesced": here[-1]["updates_coalesced"] - watched.lines[first - 1]["updates_coalesced"],
    }


def measure(name: str, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run one workload."""
    work = WORKLOADS[name]
    settings = {
        **COMMON,
        "seed": args.seed,
        "steps": args.steps or work.steps,
        "rollout.engine": args.engine,
        "rollout.slots": work.places,
        "rollout.max_episodes": work.places,
        "batch.groups": work.groups,
        **work.overrides,
    }
    overrides = [f"{key}={_toml(value)}" for key, value in settings.items()] + args.overrides
    config = load_config(CONFIGS / "latency.toml", overrides)
    last = config.steps - config.staleness.max_age - 2
    if last - WARM < 5:
        raise UserError(f"{config.steps} steps leave no window: use {WARM + config.staleness.max_age + 7} or more.")
    watched = train(CONFIGS / "latency.toml", scratch / name, overrides, (WARM, last), RUN_SECONDS)
    found = figures(watched, WARM, last, config.group.size, config.rollout.nodes)
    summary = watched.summary
    return {
        "what": work.what,
        "overrides": overrides,
        **found,
        "summary": {k: summary[k] for k in ("prefill", "reprefill", "notes")},
    }


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


# --- every against budget -----------------------------------------------------------------------------------------------------

POLICIES = ("every", "budget")


def policy_arm(kind: str, seed: int, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """A whole run of `--config` under one policy. Seconds are those of the nodes' clocks, evaluations included (`--serial`:
    logical ones, where [serial] says what work costs, so that other work on the machine does not disturb them)."""
    overrides = [f'update.policy="{kind}"', f"seed={seed}", *args.overrides]
    if kind == "budget":
        overrides += [f"update.reprefill_budget={args.budget}", f"update.reprefill_window={args.window}"]
    config = load_config(args.config, overrides)
    watched = train(args.config, scratch / f"{kind}-{seed}", overrides, (), POLICY_SECONDS, serial=args.serial)
    summary = watched.summary
    there = sum(summary["roles"]["rollout"]["states"].values()) / config.rollout.nodes
    return {
        "reprefill_share": summary["reprefill"]["rollout_share"],
        "tokens_per_second": summary["tokens"]["trained"] / there,
        "rollout_seconds": there,
        "success": {name: (found or {}).get("success") for name, found in summary["eval"].items()},
        "staleness": summary["staleness"],
        "tokens": summary["tokens"],
        "reprefill": summary["reprefill"],
        "overrides": overrides,
    }


def compare(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Both policies in turns."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in POLICIES}
    for repeat in range(args.repeats):
        for kind in POLICIES:
            run = policy_arm(kind, args.seed + repeat, args, scratch)
            runs[kind].append(run)
            bill = run["reprefill"]
            print(
                f"{kind:>7} {repeat}: re-prefill {run['reprefill_share']:.2%} of rollout time, {bill['updates']} updates "
                f"{bill['inflight']}, coalesced {bill['coalesced']}, {run['tokens_per_second']:.0f} trained tokens/s, "
                f"success {run['success'].get('after')}, mean age {run['staleness']['mean']:.2f}",
                flush=True,
            )
    return {"policy": runs, "budget": args.budget, "window": args.window}


def told(name: str, run: Mapping[str, Any]) -> str:
    """One workload on the console."""
    of = run["made_of"]
    return (
        f"{name:>7}: predicted {run['predicted']:.3f}, measured {run['measured']:.3f} re-prefilled tokens per trained token, "
        f"ratio {run['ratio']:.3f} (corrected {run['ratio_corrected']:.3f}), C/B {run['c_over_b']:.2f}, cv {of['cv']:.2f}, "
        f"P/E[L] {of['prompt'] / of['length']:.2f}, E[L] {of['length']:.0f}"
    )


def workloads(args: argparse.Namespace, scratch: Path, failed: list[str]) -> dict[str, Any]:
    """Those asked for, one after the other; `failed` gets the names of those that are too far off."""
    runs: dict[str, dict[str, Any]] = {}
    for name in args.workloads:
        run = runs[name] = measure(name, args, scratch)
        judged = run["ratio_corrected" if name in BROKEN else "ratio"]
        if abs(judged - 1) > TOLERANCE:
            failed.append(name)
        print(told(name, run), flush=True)
    ratios = [run["ratio"] for name, run in runs.items() if name not in BROKEN]
    return {"workloads": runs, "worst": max((abs(ratio - 1) for ratio in ratios), default=None)}


# --- the command --------------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("reprefill", __doc__)
    parser.add_argument("--json", type=json_file, help="write the figures here")
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=list(THREE))
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--steps", type=positive, help="of each run")
    parser.add_argument("--policy", action="store_true", help="compare update.policy every and budget instead")
    parser.add_argument("--config", type=Path, default=CONFIGS / "quickstart.toml", help="of --policy")
    parser.add_argument("--serial", action="store_true", help="of --policy: runs in one process, on a logical clock")
    parser.add_argument("--budget", type=float, default=0.02, help="update.reprefill_budget of --policy")
    parser.add_argument("--window", type=float, default=20.0, help="update.reprefill_window of --policy, in seconds")
    parser.add_argument("--repeats", type=positive, default=1, help="of --policy: runs per arm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run directories here")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    where = result.machine()
    failed: list[str] = []
    found: dict[str, Any] = {"engine": args.engine}
    try:
        with scratch("reprefill", args.keep) as folder:
            if args.policy:
                found |= compare(args, folder)
            else:
                found |= workloads(args, folder, failed)
    except (RunFailed, UserError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    packages = ("torch", "transformers", "ray")
    seeds = [args.seed + repeat for repeat in range(args.repeats if args.policy else 1)]
    result.write(
        args.json, result.document("reprefill", found, seeds=seeds, arguments=vars(args), packages=packages, where=where)
    )
    if failed:
        print(f"More than {TOLERANCE:.0%} off: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(ended(main))
