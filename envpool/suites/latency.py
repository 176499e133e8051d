"""The suite `latency`: a synthetic environment whose timing, lengths and faults are drawn from the task's seed.

The policy is asked to repeat a word ("say delta"); the reward at the end is the share of turns in which it did. Everything
else is for benchmarks and fault tests. Each draw has its own key (seed, member, attempt where it may not repeat, turn, what), so
virtual time, serial mode and a real run draw the same, and no draw depends on what other instances did. In worker processes the
time is slept (or burnt); deferred (`envpool.environment.Timed`), the loop waits it out instead.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from envpool.args import parse_args
from envpool.environment import Demonstration, Environment, Policy, SimulatedCrash, Split, play
from segue.episode import Task
from segue.errors import UserError
from segue.ports.envpool import ChatMessage, Observation, Resume, StepResult

# fmt: off
WORDS = [
    "alfa", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett", "kilo", "lima", "mike",
    "november", "oscar", "papa", "quebec", "romeo", "sierra", "tango", "uniform", "victor", "whiskey", "xray", "yankee", "zulu",
]
# fmt: on
TASKS = 1 << 31

Probability = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class LatencyArgs(msgspec.Struct, frozen=True):
    """`[task.args]` of latency.

    turns_min/max      turns of an episode, uniform
    turns_mean         above 0: geometric instead, with this mean before it is cut off at turns_min and turns_max
    words_min/max      words of an observation, uniform
    prompt_words       of the first one, the prompt; 0: as all others
    distribution       of the step time: constant; gaussian (clipped at 0); lognormal; pareto (Lomax: heavy tail)
    mean               seconds of a step, on average; one drawn above envpool.step_seconds fails in every attempt
    spread             gaussian: standard deviation, seconds; lognormal: sigma of the logarithm; pareto: the tail index, above 1
    burn               True burns CPU instead of sleeping
    reset_seconds      of every reset; a slow reset takes `slow_reset_seconds`, with probability `slow_reset`
    exception          probability per step that the environment raises
    hang               probability per step that it never returns
    crash              probability per step that it ends its worker process
    transient          True draws faults anew in every attempt; False repeats them, so that the task always fails
    snapshots          False leaves only replay to rebuild an episode
    noise              of the reward: a number drawn between 0 and this is added, so that a policy that knows nothing has groups
                       to learn from, too (a learner computes no gradient of a group whose members are all alike)
    """

    turns_min: Positive = 4
    turns_max: Positive = 4
    turns_mean: float = 0.0
    words_min: Positive = 4
    words_max: Positive = 4
    prompt_words: Annotated[int, msgspec.Meta(ge=0)] = 0
    distribution: Literal["constant", "gaussian", "lognormal", "pareto"] = "constant"
    mean: Seconds = 0.0
    spread: Seconds = 0.0
    burn: bool = False
    reset_seconds: Seconds = 0.0
    slow_reset: Probability = 0.0
    slow_reset_seconds: Seconds = 0.0
    exception: Probability = 0.0
    hang: Probability = 0.0
    crash: Probability = 0.0
    transient: bool = True
    snapshots: bool = True
    noise: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0


def draw_seconds(args: LatencyArgs, rng: random.Random) -> float:
    """One step time in seconds; its mean is `args.mean` (the gaussian's a little above where clipping bites)."""
    if args.mean == 0.0:
        return 0.0
    if args.distribution == "gaussian":
        return max(0.0, rng.gauss(args.mean, args.spread))
    if args.distribution == "lognormal":
        return rng.lognormvariate(math.log(args.mean) - args.spread**2 / 2, args.spread)
    if args.distribution == "pareto":
        return args.mean * (args.spread - 1) * (rng.paretovariate(args.spread) - 1)
    return args.mean


def draw_turns(args: LatencyArgs, rng: random.Random) -> int:
    """Turns of one episode."""
    if not args.turns_mean:
        return rng.randint(args.turns_min, args.turns_max)
    turns = 1 + int(math.log(1.0 - rng.random()) / math.log1p(-1.0 / args.turns_mean)) if args.turns_mean > 1.0 else 1
    return min(max(turns, args.turns_min), args.turns_max)


class _State(msgspec.Struct):
    turn: int = 0
    right: int = 0
    last: str = ""


class LatencyEnvironment:
    """See the module."""

    def __init__(self, args: LatencyArgs, task: Task, member: int, attempt: int) -> None:
        self.resume = Resume.SNAPSHOT if args.snapshots else Resume.REPLAY
        self._args = args
        self._task = task
        self._member = member
        self._attempt = attempt if args.transient else 1
        self._state = _State()
        self._turns = draw_turns(args, self._draw("turns"))
        self._deferred = False
        self._owed = 0.0

    def defer(self) -> None:
        self._deferred = True

    def owed(self) -> float:
        return self._owed

    def reset(self, task: Task, seed: int) -> Observation:
        self._task = task
        self._state = _State(last=self._text(0))
        slow = self._strikes("slow_reset", -1, self._args.slow_reset)
        self._spend(self._args.slow_reset_seconds if slow else self._args.reset_seconds)
        return self._observation()

    def step(self, action: str) -> StepResult:
        state, args = self._state, self._args
        if state.turn >= self._turns:
            raise RuntimeError("step after the end of the episode")
        self._fail(state.turn)
        hangs = self._strikes("hang", state.turn, args.hang)
        self._spend(math.inf if hangs else draw_seconds(args, self._draw(f"{self._member}/{state.turn}/seconds")))
        state.right += int(action.strip() == self._word(state.turn))
        state.turn += 1
        state.last = self._text(state.turn)
        ended = state.turn == self._turns
        reward = state.right / self._turns if ended else 0.0
        if ended and args.noise:
            reward += args.noise * self._draw(f"{self._member}/noise").random()
        return StepResult(self._observation(), reward, ended, False, {"success": float(ended and state.right == self._turns)})

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self._state)

    def restore(self, snapshot: bytes) -> Observation:
        self._state = msgspec.msgpack.decode(snapshot, type=_State)
        self._owed = 0.0
        return self._observation()

    def close(self) -> None:
        self._owed = 0.0

    def _draw(self, what: str) -> random.Random:
        return random.Random(f"latency/{self._task.seed}/{what}")

    def _strikes(self, what: str, turn: int, probability: float) -> bool:
        """Whether a fault is drawn here, in this attempt."""
        return probability > 0.0 and self._draw(f"{self._member}/{self._attempt}/{turn}/{what}").random() < probability

    def _fail(self, turn: int) -> None:
        if self._strikes("exception", turn, self._args.exception):
            self._owed = 0.0
            raise RuntimeError(f"drawn exception in turn {turn}")
        if self._strikes("crash", turn, self._args.crash):
            if self._deferred:
                raise SimulatedCrash(f"drawn crash in turn {turn}")
            os._exit(70)

    def _spend(self, seconds: float) -> None:
        if self._deferred:
            self._owed = seconds
        elif self._args.burn:
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass
        else:
            while seconds > 0:  # a sleep of for ever in pieces: time.sleep has a limit
                time.sleep(min(seconds, 3600.0))
                seconds -= 3600.0

    def _word(self, turn: int) -> str:
        return self._draw(f"{turn}/word").choice(WORDS)

    def _text(self, turn: int) -> str:
        rng = self._draw(f"{turn}/text")
        words = rng.randint(self._args.words_min, self._args.words_max)
        filler = rng.choices(WORDS, k=self._args.prompt_words or words if turn == 0 else words)
        return " ".join([*filler, "say", self._word(turn)])

    def _observation(self) -> Observation:
        return Observation([ChatMessage("user", self._state.last)])


class LatencySuite:
    """See the module."""

    name = "latency"

    def __init__(self, args: LatencyArgs) -> None:
        for what in ("turns", "words"):
            low, high = getattr(args, f"{what}_min"), getattr(args, f"{what}_max")
            if low > high:
                raise UserError(
                    f"task.args.{what}_min = {low} is above task.args.{what}_max = {high}: lower one or raise the other."
                )
        if args.distribution == "pareto" and args.spread <= 1.0:
            raise UserError(
                f"task.args.spread = {args.spread:g} with distribution = 'pareto' has no mean: set the tail index above 1."
            )
        self.args = args

    def tasks(self, split: Split, n: int, seed: int) -> list[Task]:
        """Even seeds train, odd ones are held out."""
        rng = random.Random(f"latency/{split}/{seed}")
        seeds: dict[int, None] = {}
        while len(seeds) < n:
            seeds[2 * rng.randrange(TASKS) + (split == "eval")] = None
        return [Task(id=f"latency: {number}", env=self.name, seed=number) for number in seeds]

    def make(self, task: Task, member: int, attempt: int = 1) -> Environment:
        return LatencyEnvironment(self.args, task, member, attempt)

    def oracle(self, task: Task) -> Policy:
        return lambda observation: observation.messages[-1].content.rsplit(" ", 1)[1]

    def demonstrate(self, task: Task, rng: random.Random, good_share: float) -> Demonstration:
        """Says the word it is asked for, or with probability 1 − `good_share` any word in every turn. Takes no time."""
        good = rng.random() < good_share
        oracle = self.oracle(task)
        quick = LatencySuite(msgspec.structs.replace(self.args, exception=0.0, crash=0.0, hang=0.0))
        environment = quick.make(task, 0)
        assert isinstance(environment, LatencyEnvironment)
        environment.defer()
        return play(environment, task, oracle if good else lambda _: rng.choice(WORDS))

    def vocabulary(self) -> list[str]:
        return ["say", *WORDS]

    def texts(self) -> Iterator[str]:
        yield from (f"{word} say {word}" for word in WORDS)


def build(args: dict[str, Any]) -> LatencySuite:
    """The suite with `[task.args]`. Raises UserError."""
    return LatencySuite(parse_args("latency", args, LatencyArgs))
