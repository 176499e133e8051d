"""Episodes of Segue's environments for a trainer that generates whole batches turn by turn, as TRL's GRPO trainer does.

What an episode is made of is Segue's own code, so that the same actions give the same tokens, masks and rewards as on a rollout
node: `rollout.log.EpisodeLog` keeps the books, `rollout.chat.ChatRenderer` writes prompts and observations, `rollout.fit` cuts
what is too long. What differs is the order: all episodes of a batch sample a turn together, then all of their environments step
at once, and the next turn begins when the last of them has answered. This module does not import TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from envpool.environment import Environment, Suite
from rollout.chat import ChatRenderer
from rollout.fit import fit_observation
from rollout.log import Budget, EpisodeLog, Phase, Piece
from segue.config import Config
from segue.episode import DeltaBody, Outcome, Task, TurnRecord
from segue.ports.engine import Chunk
from segue.ports.envpool import RESET_STEP, Observation, StepResult, observation_digest
from segue.trajectory import Author, context

Generate = Callable[[list[list[int]]], list[list[int]]]
"""Contexts in, sampled ids out, one list for each, ended by a stop token or by their number."""
NO_VERSION_KNOWN = 0
"""TRL samples with the weights it trains: there are no versions to tell apart."""


@dataclass(frozen=True)
class Played:
    """One finished episode: `prompt` and `completion` ids (up to the last sampled one), `mask` 1 where the policy sampled."""

    prompt: list[int]
    completion: list[int]
    mask: list[int]
    reward: float
    outcome: Outcome
    turns: int


class Episode:
    """One episode between its environment and whoever samples for it."""

    def __init__(self, environment: Environment, task: Task, renderer: ChatRenderer, config: Config) -> None:
        self._environment = environment
        self._task = task
        self._renderer = renderer
        self._rollout = config.rollout
        closing = len(renderer.close_tokens)
        self.log = EpisodeLog(Budget(self._rollout.max_turns, self._rollout.max_tokens, self._rollout.max_turn_tokens, closing))
        self._mask: list[int] = []

    @property
    def over(self) -> bool:
        return self.log.phase is Phase.OVER

    def reset(self) -> None:
        """Open the environment and write the prompt."""
        first = self._environment.reset(self._task, self._task.seed)
        self._write(DeltaBody(self._renderer.prompt_log(first), _record(RESET_STEP, None, "", first)))

    def act(self, ids: Sequence[int]) -> None:
        """Take a turn's sampled ids, as far as its budget and its stop strings let them count."""
        kept = self._until_stop(list(ids[: self.log.allowance]))
        piece = Piece(self.log.turn)
        piece.take(Chunk(kept, [0.0] * len(kept), [(NO_VERSION_KNOWN, len(kept))], NO_VERSION_KNOWN))
        self._write(piece.complete(self._renderer.closing(kept), self._renderer.text(kept)))

    def _until_stop(self, ids: list[int]) -> list[int]:
        for end in range(1, len(ids) + 1) if self.log.stop else ():
            if any(stop in self._renderer.text(ids[:end]) for stop in self.log.stop):
                return ids[:end]
        return ids

    def step(self) -> StepResult:
        """Give the action to the environment; may wait as long as that takes."""
        assert self.log.waiting is not None, "no action to take"
        return self._environment.step(self.log.waiting)

    def observe(self, result: StepResult) -> None:
        """Write down what the environment did."""
        turn, action = self.log.turn, self.log.waiting or ""
        last = result.terminated or result.truncated or turn + 1 >= self._rollout.max_turns
        ids = [] if last else self._fit(result.observation)
        self._write(DeltaBody(context(ids, Author.OBSERVATION, turn), _record(turn, result, action, result.observation)))

    def _fit(self, observation: Observation) -> list[int]:
        most, action = self._rollout.max_observation_tokens, self._rollout.max_turn_tokens
        return fit_observation(self._renderer, observation.messages, room=self.log.room, most=most, action=action)

    def _write(self, body: DeltaBody) -> None:
        self._mask += [int(m) for m in body.log.mask]
        self.log.write(body, 0, 1)

    def played(self) -> Played:
        """What to train, once it is over."""
        log, outcome = self.log, self.log.outcome
        assert outcome is not None, "the episode goes on"
        self._environment.close()
        prompt = log.prompt
        end = max((i + 1 for i, m in enumerate(self._mask) if m), default=prompt)
        return Played(log.tokens[:prompt], log.tokens[prompt:end], self._mask[prompt:end], log.reward, outcome, log.turn)


def _record(turn: int, result: StepResult | None, action: str, observation: Observation) -> TurnRecord:
    return TurnRecord(
        turn=turn,
        reward=float(result.reward) if result is not None else 0.0,
        terminated=result.terminated if result is not None else False,
        truncated=result is not None and result.truncated and not result.terminated,
        action=action,
        observation_hash=observation_digest(observation),
        snapshot=None,
        info=result.info if result is not None else {},
        stop=observation.stop,
    )


def play_batch(
    suite: Suite,
    asked: Sequence[tuple[Task, int]],
    renderer: ChatRenderer,
    config: Config,
    generate: Generate,
    threads: ThreadPoolExecutor,
) -> list[Played]:
    """One episode for each (task, member), in their order. `threads` needs one thread per episode: environments only wait."""
    episodes = [Episode(suite.make(task, member), task, renderer, config) for task, member in asked]
    list(threads.map(Episode.reset, episodes))
    while active := [episode for episode in episodes if not episode.over]:
        actions = generate([list(episode.log.tokens) for episode in active])
        for episode, ids in zip(active, actions, strict=True):
            episode.act(ids)
        for episode, result in zip(active, threads.map(Episode.step, active), strict=True):
            episode.observe(result)
    return [episode.played() for episode in episodes]
