"""Scripted policies: the oracle, and the teacher of mixed quality that a warm start distils.

The teacher is better at the first operation than at the others: there it works the whole chain through more often than not,
elsewhere it mostly guesses at once. What is distilled from it is therefore a policy with something to learn, also when it is
decoded greedily, and that succeeds often enough everywhere for reinforcement to find it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from envpool.environment import Policy
from envpool.suites.search_qa.tasks import SYMBOLS
from segue.episode import Task
from segue.ports.envpool import Observation

BAD_HABITS = {"guess": 0.7, "skip": 0.2, "miscalculate": 0.1}
"""How often each when the chain is not done right: guess at once, skip the second look-up, calculate wrongly."""
STRONG = 1.6
"""How much likelier than on average the chain is done right on questions of the first operation."""
_RESULT = re.compile(r"(-?\d+)(?=(?:;[^<]*)?</information>)")


def oracle(task: Task) -> Policy:
    """Looks both facts up, calculates, answers. It reads the numbers from the observations."""
    return _Chain(task, "good", random.Random(0))


def teacher(task: Task, operations: Sequence[str], rng: random.Random, good_share: float) -> Policy:
    """A policy that does the whole chain with probability `good_share` on average over the operations, else has a bad habit."""
    good = rng.random() < good_probability(str(task.payload["operation"]), operations, good_share)
    habit = "good" if good else rng.choices(list(BAD_HABITS), list(BAD_HABITS.values()))[0]
    return _Chain(task, habit, rng)


def good_probability(operation: str, operations: Sequence[str], good_share: float) -> float:
    """How likely the teacher is to do a question of `operation` right; its mean over `operations` is `good_share`."""
    n = len(operations)
    if n == 1:
        return good_share
    strong = min(1.0, STRONG * good_share)
    return strong if operation == operations[0] else (n * good_share - strong) / (n - 1)


class _Chain:
    def __init__(self, task: Task, habit: str, rng: random.Random) -> None:
        self._queries = [str(query) for query in task.payload["queries"]]
        self._symbol = SYMBOLS[str(task.payload["operation"])]
        self._habit = habit
        self._rng = rng
        self._turn = -1
        self._values: list[str] = []

    def __call__(self, observation: Observation) -> str:
        self._turn += 1
        if self._turn > 0:
            found = _RESULT.search(observation.messages[-1].content)
            self._values.append(found[1] if found else "0")
        looked_up = 1 if self._habit == "skip" else 2
        if self._habit == "guess":
            return f"<answer>{self._rng.randint(20, 999)}</answer>"
        if self._turn < looked_up:
            return f"<search>{self._queries[self._turn]}</search>"
        if self._turn > 2 or looked_up == 1:
            return f"<answer>{self._values[-1]}</answer>"
        return f"<calc>{self._values[0]}{self._sign()}{self._values[1]}</calc>"

    def _sign(self) -> str:
        if self._habit != "miscalculate":
            return self._symbol
        return self._rng.choice([symbol for symbol in SYMBOLS.values() if symbol not in (self._symbol, "*")])
