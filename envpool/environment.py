"""The environment contract: Gymnasium's, for text, with snapshots; and the suites that make environments and their tasks.

An environment is one conversation partner for one episode attempt. It runs synchronously in a thread of its own inside a
worker process; it never shares random state with other instances, and it is never used again after it raised. Mistakes in an
*action* are observations (what was wrong, which forms are valid), not exceptions. What an environment raises is its own fault
(`env`), except `DataError`: the task's data or its scorer is at fault (`data`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Literal, Protocol, runtime_checkable

import msgspec

from segue.episode import Task, observation_hash
from segue.ports.envpool import Observation, Resume, StepResult

Split = Literal["train", "eval"]
Policy = Callable[[Observation], str]
"""A scripted policy: the newest observation in, an action out. It may remember what it saw."""


class DataError(Exception):
    """The task's own data or its scorer is at fault, not the environment: a `data` failure."""


class Environment(Protocol):
    """One instance, made for one attempt of one task. Calls never overlap.

    `resume` says what the instance can do; only under SNAPSHOT are `snapshot` and `restore` called.
    """

    resume: Resume

    def reset(self, task: Task, seed: int) -> Observation:
        """Begin. The same (task, seed) gives the same first observation in every process; all members of a group share it."""
        ...

    def step(self, action: str) -> StepResult:
        """One turn. Never both terminated and truncated; nothing is reset behind the caller's back."""
        ...

    def snapshot(self) -> bytes:
        """All that `restore` needs to go on from here with an equal future, random state included. Never pickle."""
        ...

    def restore(self, snapshot: bytes) -> Observation:
        """Instead of `reset`, on a fresh instance made for the same task: go on there. Returns the last observation again."""
        ...

    def close(self) -> None:
        """Release everything. Called once, also after an error."""
        ...


@runtime_checkable
class Timed(Protocol):
    """An environment whose calls last as long as a model says. In serial mode and virtual time the loop does the waiting."""

    def defer(self) -> None:
        """From now on do not sleep or burn CPU: report through `owed` instead, and raise `SimulatedCrash` instead of dying."""
        ...

    def owed(self) -> float:
        """Seconds that the last call should have taken; infinite for a hang."""
        ...


@runtime_checkable
class Keyed(Protocol):
    """An environment whose steps have effects outside of it (a booking, a mail, a payment), which must not happen twice."""

    def take_key(self, key: str) -> None:
        """Told before every `step`, replayed ones included: the idempotency key of that step's effects (`effect_key`)."""
        ...


def effect_key(episode: int, turn: int, action: str) -> str:
    """The idempotency key of what `action` does in a turn of an episode, unique within a run.

    It does not depend on the attempt: one that repeats a turn whose observation was lost, or replays an old one, has the same
    key, so that the far side can answer without doing it again. Where the action itself was lost and another is sampled in its
    place, the key is another one too, so that no action gets the answer to a different one.
    """
    return f"{episode}.{turn}.{observation_hash([action]):08x}"


class SimulatedCrash(Exception):
    """A deferred environment's way to say that here its worker process would have died."""


class DemoTurn(msgspec.Struct, frozen=True):
    """One action of a teacher and what came of it."""

    action: str
    result: StepResult


class Demonstration(msgspec.Struct, frozen=True):
    """One episode played by a scripted teacher in the real environment: what a warm start distils."""

    prompt: Observation
    turns: list[DemoTurn]

    @property
    def reward(self) -> float:
        """Episode return."""
        return sum(turn.result.reward for turn in self.turns)

    @property
    def success(self) -> float:
        """`info["success"]` of the last turn, 0 if there is none."""
        return self.turns[-1].result.info.get("success", 0.0) if self.turns else 0.0


class Suite(Protocol):
    """A family of tasks and the environments for them. Everything is a function of its arguments: no global random state."""

    name: str

    def tasks(self, split: Split, n: int, seed: int) -> list[Task]:
        """`n` distinct tasks, the same for the same arguments. No task is ever in both splits, whatever `n` and `seed`.

        Raises UserError if the suite has fewer than `n`.
        """
        ...

    def make(self, task: Task, member: int, attempt: int = 1) -> Environment:
        """A fresh instance. `member` may seed what differs inside a group, `attempt` faults that are to be drawn anew.

        Neither keys effects outside of the environment: a later attempt may repeat a turn (`Keyed`).
        """
        ...

    def oracle(self, task: Task) -> Policy:
        """A scripted policy that succeeds on `task` with reward 1."""
        ...

    def demonstrate(self, task: Task, rng: random.Random, good_share: float) -> Demonstration:
        """An episode by a teacher of mixed quality: on average over tasks a share `good_share` of them is done right."""
        ...

    def vocabulary(self) -> list[str]:
        """Words and markers that a tokenizer trained for this suite must keep whole. Digits are not among them."""
        ...

    def texts(self) -> Iterator[str]:
        """Text in which everything that can be read or written in an episode occurs: to train a tokenizer on."""
        ...


def play(environment: Environment, task: Task, policy: Policy, max_turns: int = 1000) -> Demonstration:
    """Run one episode with a scripted policy, on the caller's thread. Closes the environment."""
    try:
        observation = prompt = environment.reset(task, task.seed)
        turns: list[DemoTurn] = []
        while len(turns) < max_turns:
            action = policy(observation)
            result = environment.step(action)
            turns.append(DemoTurn(action, result))
            observation = result.observation
            if result.terminated or result.truncated:
                break
        return Demonstration(prompt, turns)
    finally:
        environment.close()
