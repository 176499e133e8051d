"""What episodes are like: lengths, latencies and rewards, each a function of the run's seed and of (group, member, turn) alone.

Environments know a group by its task's number and an episode in it by its member number; engines know it by the scheduler's group
number and the episode's sampling seed. Lengths are in units (`Scenario.unit` tokens each).
"""

from __future__ import annotations

from benchmarks.virtual.distributions import Draws, uniform
from benchmarks.virtual.scenario import ENV, World, distributions
from benchmarks.virtual.tokenizer import OBSERVATION_OVERHEAD, PROMPT_OVERHEAD
from segue.episode import Task

_REWARD, _FAULT = 101, 102


class Workload:
    """The draws of one world."""

    def __init__(self, world: World) -> None:
        scenario = world.scenario
        self._unit = scenario.unit
        self._model = scenario.workload
        self._longest_action = world.config.rollout.max_turn_tokens
        seed = world.config.seed
        draws = {
            name: Draws(spec, (seed << 8) + stream, world.values.get(name, ()))
            for stream, (name, spec) in enumerate(distributions(scenario))
        }
        self._seed = seed
        self._turns = draws["workload.turns"]
        self._prompt = draws["workload.prompt_tokens"]
        self._action = draws["workload.action_tokens"]
        self._observation = draws["workload.observation_tokens"]
        self.step_seconds = draws["env.step_seconds"]
        self.reset_seconds = draws["env.reset_seconds"]

    def tasks(self, count: int) -> list[Task]:
        """Tasks number 0 … count − 1."""
        return [Task(f"{ENV}: {number}", ENV, number) for number in range(count)]

    def turns(self, group: int, member: int) -> int:
        """Turns after which the environment ends the episode, at least 1."""
        return max(1, round(self._turns.draw(group, member, 0)))

    def prompt_characters(self, group: int) -> int:
        """Text of the first observation; with what the template adds it has the drawn length."""
        return max(1, self._units(self._prompt.draw(group, 0, 0)) - PROMPT_OVERHEAD)

    def observation_characters(self, group: int, member: int, turn: int) -> int:
        """Text of the observation after a turn."""
        return max(1, self._units(self._observation.draw(group, member, turn)) - OBSERVATION_OVERHEAD)

    def action_tokens(self, group: int, member: int, turn: int) -> int:
        """Tokens sampled in a turn, the one that ends it included; at most `rollout.max_turn_tokens`."""
        return min(self._longest_action, max(1, self._units(self._action.draw(group, member, turn))))

    def reward(self, group: int, member: int) -> float:
        return float(uniform((self._seed << 8) + _REWARD, group, member, 0) < self._model.success)

    def strikes(self, what: int, probability: float, group: int, member: int, attempt: int, turn: int) -> bool:
        """Whether fault number `what` happens in this turn of this attempt."""
        return (
            probability > 0.0 and uniform((self._seed << 8) + _FAULT + what, group, member, (attempt << 24) + turn) < probability
        )

    def _units(self, tokens: float) -> int:
        return round(tokens / self._unit)
