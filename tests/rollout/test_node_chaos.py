"""Everything at once: two nodes, updates, evictions, parks, drops, fences and a bad line, in random order and at random times.

Whatever happens, every episode ends as it would have alone: its tokens depend on its seed only, so they tell whether anything
was lost, sampled twice or mixed up.
"""

from __future__ import annotations

import asyncio
import random
from functools import cache

import numpy as np
import pytest
from fake_scheduler import Record
from node_world import Node, World, config, run, words_policy

from segue.episode import Task
from segue.ports.rollout import Drop, ParkOrder, Paused, Resumed

EPISODES = 10
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 20))]


def task(episode: int) -> Task:
    return Task(f"task-{episode}", "talk", episode, {"turns": 3 + episode % 3, "reply": "the {} lamp"})


@cache
def alone(episode: int) -> tuple[list[int], float]:
    async def main() -> tuple[list[int], float]:
        async with World(policy=words_policy(9)) as w:
            await w.lease(episode, task=task(episode))
            record = await w.scheduler.finished(episode)
            assert record.finish is not None
            return record.log().tokens.tolist(), record.finish.reward

    return run(main())


class Chaos:
    """A scheduler's worst day."""

    def __init__(self, w: World, rng: random.Random) -> None:
        self.w, self.rng = w, rng
        self.where: dict[int, Node] = {}

    def newest_node(self, record: Record) -> Node:
        """One whose weights are no older than what the episode holds."""
        log = record.log() if record.deltas else None
        floor = int(log.versions.max()) if log is not None and len(log) else -1
        return self.rng.choice([n for n in self.w.nodes if n.engine.version >= floor])

    async def lease(self, episode: int) -> None:
        known = self.w.scheduler.episodes.get(episode)
        node = self.newest_node(known) if known is not None else self.rng.choice(self.w.nodes)
        self.where[episode] = node
        await self.w.lease(episode, node, task=task(episode), group=episode // 2)

    async def act(self) -> None:
        w, rng = self.w, self.rng
        episode = rng.randrange(EPISODES)
        record = w.scheduler.episodes[episode]
        node = self.where[episode]
        match rng.choice(["update", "update", "evict", "preempt", "park", "drop", "steal", "fence", "line"]):
            case "update":
                version = w.version + 1
                w.version = version
                for each in w.nodes:
                    each.receiver.seconds = rng.random() * 0.1
                    await w.begin_update(each, version=version, drain_seconds=rng.random() * 0.2)
            case "evict":
                node.engine.evict(episode)
            case "preempt":
                node.engine.preempt(episode)
            case "park":
                await w.scheduler.push(node.name, ParkOrder(episode, record.attempt))
            case "drop":
                await w.scheduler.push(node.name, Drop(episode, record.attempt, "redundant"))
            case "steal":
                if not record.finished:
                    await self.lease(episode)
            case "fence":
                session = w.scheduler.sessions[node.name]
                w.scheduler.fence(node.name)
                for other, place in self.where.items():
                    if place is node:
                        w.scheduler.episodes[other].leased = False
                assert node.shell._exchange is not None
                await w.scheduler.until_joined(node.name, session + 1)
                await w.begin_update(node, version=w.version)
            case "line":
                fates = [rng.choice(["", "", "", "unanswered", "unsent", "twice", "lost"]) for _ in range(8)]
                node.up.disturb = lambda method, n: fates[n % 8] if n % 8 else ""

    async def run(self) -> None:
        for episode in range(EPISODES):
            await self.lease(episode)
        for _ in range(25):
            await asyncio.sleep(self.rng.random() * 0.12)
            await self.act()
            for episode, record in self.w.scheduler.episodes.items():
                if not record.leased and not record.finished:
                    await self.lease(episode)
        for node in self.w.nodes:
            node.up.disturb = lambda method, n: ""
        for episode, record in self.w.scheduler.episodes.items():
            while not record.finished:
                if not record.leased:
                    await self.lease(episode)
                await self.w.scheduler.until(episode, lambda r: not r.leased)


@pytest.mark.parametrize("mode", ["recompute", "keep", "turn", "episode"])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_episode_ends_as_it_would_have_alone(mode: str, seed: int) -> None:
    expected = [alone(episode) for episode in range(EPISODES)]

    async def main() -> None:
        cfg = config(update={"inflight": mode})
        async with World(cfg, nodes=2, policy=words_policy(9), snapshot_every=seed % 3) as w:
            await Chaos(w, random.Random(seed)).run()
            await asyncio.sleep(20.0)
            for episode, record in w.scheduler.episodes.items():
                tokens, reward = expected[episode]
                log = record.log()
                log.validate()
                assert log.tokens.tolist() == tokens and not record.fails, record.fails
                assert record.finish is not None and record.finish.reward == reward
                versions = log.versions[log.mask == 1]
                assert np.all(np.diff(versions) >= 0), "no token comes from older weights than one before it"
                if mode != "keep":
                    assert np.array_equal(log.versions, log.kv_versions)
            assert w.pool.instances == {}
            for node in w.nodes:
                assert not node.shell.failed.done() and node.shell._running == {} and node.engine._open == {}
                assert sum(node.shell._ledger.prefilled.values()) == node.engine.prefill
                assert node.shell._ledger.cached == node.engine.cached
                states = node.activity.seconds()
                assert sum(states.values()) == pytest.approx(asyncio.get_running_loop().time() - node.began)
            paused = sum(isinstance(e, Paused) for e in w.scheduler.events)
            resumed = sum(isinstance(e, Resumed) for e in w.scheduler.events)
            assert resumed <= paused + sum(r.attempt - 1 for r in w.scheduler.episodes.values())

    run(main())
