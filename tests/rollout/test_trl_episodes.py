"""What TRL is given to train is what a rollout node would have logged: the same tokens, masks, rewards for the same actions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from fake_pool import Talk
from fake_scheduler import Record
from node_world import World, config, renderer, run

from benchmarks.trl_episodes import Played, play_batch
from segue.config import Config
from segue.episode import Outcome, Task


class Suite:
    """Talks, as the node's fake pool has them."""

    def make(self, task: Task, member: int) -> Any:
        talk = Talk(task)
        return _Environment(talk)


class _Environment:
    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.closed = False

    def reset(self, task: Task, seed: int) -> Any:
        return self._talk.reset()

    def step(self, action: str) -> Any:
        return self._talk.step(action)

    def close(self) -> None:
        assert not self.closed
        self.closed = True


def on_a_node(task: Task, cfg: Config) -> Record:
    world = World(cfg)

    async def main() -> Record:
        async with world:
            await world.lease(0, task=task)
            return await world.scheduler.until(0, lambda record: not record.leased)

    return run(main())


def actions_of(record: Record) -> list[list[int]]:
    """The ids that were sampled, turn by turn."""
    log = record.log()
    turns: dict[int, list[int]] = {}
    start = 0
    for segment in log.segments:
        at = slice(start, start + segment.length)
        turns.setdefault(segment.turn, []).extend(log.tokens[at][log.mask[at] == 1].tolist())
        start += segment.length
    return [ids for turn, ids in sorted(turns.items()) if turn >= 0]


def replay(tasks: list[Task], actions: list[list[list[int]]], cfg: Config) -> list[Played]:
    """Play recorded actions; they are told apart by the order in which the batch asks."""
    left = [iter(each) for each in actions]
    owner: dict[tuple[int, ...], int] = {}

    def generate(contexts: list[list[int]]) -> list[list[int]]:
        if not owner:
            owner.update({tuple(context): i for i, context in enumerate(contexts)})
        found = []
        for context in contexts:
            episode = next(i for start, i in owner.items() if tuple(context[: len(start)]) == start)
            found.append([*next(left[episode]), 11, 12])  # what comes behind a turn's budget does not count
        return found

    with ThreadPoolExecutor(len(tasks)) as threads:
        return play_batch(cast(Any, Suite()), [(task, 0) for task in tasks], renderer(), cfg, generate, threads)


@pytest.mark.parametrize("max_tokens", [400, 60])
def test_the_same_actions_give_the_same_tokens_masks_and_rewards(max_tokens: int) -> None:
    cfg = config(rollout={"max_turn_tokens": 1, "max_turns": 4, "max_tokens": max_tokens})
    tasks = [Task(f"task-{seed}", "talk", seed, {"turns": turns}) for seed, turns in ((1, 2), (2, 3), (3, 9))]
    records = [on_a_node(task, cfg) for task in tasks]
    played = replay(tasks, [actions_of(record) for record in records], cfg)
    for record, mine in zip(records, played, strict=True):
        assert record.finish is not None, record.fails
        log, ours = record.log(), [*mine.prompt, *mine.completion]
        assert ours == log.tokens.tolist()[: len(ours)]
        assert [0] * len(mine.prompt) + mine.mask == log.mask.tolist()[: len(ours)] and not log.mask[len(ours) :].any()
        assert mine.mask[-1] == 1 and mine.mask[0] == 1
        assert (mine.outcome, mine.turns) == (record.finish.outcome, record.finish.turns)
        assert mine.reward == pytest.approx(record.finish.reward)
    if max_tokens == 400:
        assert [mine.outcome for mine in played] == [Outcome.TERMINATED, Outcome.TERMINATED, Outcome.TRUNCATED_TURNS]


def test_an_action_ends_with_a_stop_string() -> None:
    cfg = config(rollout={"max_turn_tokens": 5})
    ids = [20, 21, 22, 23, 24]
    stop = renderer().text(ids[1:2])
    (played,) = replay([Task("task-1", "talk", 1, {"turns": 1, "stop": [stop]})], [[ids]], cfg)
    assert played.completion == ids[:2] and played.mask == [1, 1]
