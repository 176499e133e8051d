"""Questions: two facts and an operation. Train and held-out questions never share a pair of facts, whatever the seed."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence

from envpool.environment import Split
from envpool.suites.search_qa.facts import Fact
from segue.episode import Task
from segue.errors import UserError

SYMBOLS = {"plus": "+", "minus": "-", "times": "*"}
HELD_OUT = 8
"""One pair in so many is held out."""


def pair_split(first: Fact, second: Fact) -> Split:
    """Which split a pair of facts belongs to, in either order: a hash of the pair, nothing else."""
    key = "+".join(sorted((first.key, second.key)))
    return "eval" if zlib.crc32(key.encode()) % HELD_OUT == 0 else "train"


def make_task(first: Fact, second: Fact, operation: str) -> Task:
    """The question about two facts. Of a difference, the larger value comes first."""
    if operation == "minus" and first.value < second.value:
        first, second = second, first
    value = {"plus": first.value + second.value, "minus": first.value - second.value, "times": first.value * second.value}[
        operation
    ]
    key = f"{first.attribute} of {first.name} {operation} {second.attribute} of {second.name}"
    payload = {
        "question": f"{key}?",
        "answer": str(value),
        "operation": operation,
        "queries": [first.key, second.key],
    }
    return Task(id=f"search_qa: {key}", env="search_qa", seed=zlib.crc32(key.encode()), payload=payload)


def draw_tasks(facts: list[Fact], operations: Sequence[str], split: Split, n: int, seed: int) -> list[Task]:
    """`n` distinct questions of a split in an order fixed by the seed. Raises UserError if there are fewer."""
    rng = random.Random(f"search_qa/{split}/{seed}")
    chosen: dict[str, Task] = {}
    # While less than about nine tenths of all questions are taken, drawing at random finds the next one soon.
    tries = 20 * n if n <= len(facts) ** 2 * len(operations) // 2 else 0
    while len(chosen) < n and tries:
        tries -= 1
        first, second = rng.choice(facts), rng.choice(facts)
        operation = rng.choice(operations)
        if first.name != second.name and pair_split(first, second) == split:
            task = make_task(*_ordered(first, second), operation)
            chosen.setdefault(task.id, task)
    if len(chosen) < n:
        rest = [task for task in _all_tasks(facts, operations, split) if task.id not in chosen]
        rng.shuffle(rest)
        for task in rest[: n - len(chosen)]:
            chosen[task.id] = task
    if len(chosen) < n:
        raise UserError(
            f"The suite search_qa has {len(chosen)} {split} tasks with these facts, and {n} are asked for: "
            "add facts to task.args.facts or ask for fewer."
        )
    return list(chosen.values())


def _ordered(first: Fact, second: Fact) -> tuple[Fact, Fact]:
    return (first, second) if first.key <= second.key else (second, first)


def _all_tasks(facts: list[Fact], operations: Sequence[str], split: Split) -> Iterator[Task]:
    for i, first in enumerate(facts):
        for second in facts[i + 1 :]:
            if first.name != second.name and pair_split(first, second) == split:
                for operation in operations:
                    yield make_task(*_ordered(first, second), operation)
