"""A node with the real embedded engine: what is logged is what the weights say, version by version, and the causes sum."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import chat_tokenizers as made
import pytest
import torch
from engine_models import Staged, named, probe_of, prompt, reference_logprobs, save, tiny
from fake_engine import FakeReceiver
from node_world import Node, World, config, run

from rollout.embedded import EmbeddedEngine
from segue.clock import LogicalCompute
from segue.episode import Task
from segue.ports.rollout import Drop, Loaded, ParkOrder, Paused, Resumed
from segue.ports.transfer import Transfer
from segue.trajectory import Author

torch.set_num_threads(1)
VOCAB = len(made.words())
EPISODES = 8
PROBE = prompt(7, 64)


@cache
def model_of(version: int) -> Any:
    return tiny(version, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("node-engine")
    return save(model_of(0), path)


class Receiver(FakeReceiver):
    """Stages the real weights of a version."""

    async def stage(self, transfer: Transfer, rank: int) -> Any:
        await super().stage(transfer, rank)
        model = model_of(transfer.version)
        return Staged(transfer.version, named(model), probe=probe_of(model, PROBE))


async def start(w: World, folder: str, name: str = "rollout-0", **options: Any) -> Node:
    settings: dict[str, Any] = {"slots": 3, "max_tokens": 200, "decode_cost": 0.01, "prefill_cost_per_token": 0.0005}
    engine = EmbeddedEngine(
        folder, dtype="float32", device="cpu", compute=LogicalCompute(), tokenizer=made.words(), **{**settings, **options}
    )
    return await w.add_node(name, engine=engine, receiver=Receiver(0.1))


@pytest.mark.parametrize("updates", [5, pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", ["recompute", "keep", "turn", "episode"])
def test_every_token_has_the_log_probability_of_the_weights_it_names(mode: str, updates: int, folder: str) -> None:
    """More episodes than slots, updates in the middle: F01, F16, F26, F41, and the ledger's sum, on a real engine."""

    async def main() -> None:
        budgets = {"max_tokens": 200, "max_turn_tokens": 12, "max_episodes": 200}
        cfg = config(update={"inflight": mode}, rollout=budgets, envpool={"instances": 256})
        async with World(cfg, nodes=0) as w:
            node = await start(w, folder)
            episodes = 0
            for _ in range(updates):
                for episode in range(episodes, episodes + 2 + 6 * (not episodes)):
                    await w.lease(episode, task=Task(f"t{episode // 2}", "talk", episode // 2, {"turns": 4}), group=episode // 2)
                    episodes += 1
                await asyncio.sleep(0.25)
                assert isinstance(await w.update(drain_seconds=0.2), Loaded)
            several = logged = 0
            for episode in range(episodes):
                record = await w.scheduler.finished(episode)
                log = record.log()
                log.validate()
                tokens, sampled = log.tokens.tolist(), log.mask == 1
                versions = sorted(set(log.versions[sampled].tolist()))
                several += len(versions) > 1
                logged += int(sampled.sum())
                if mode == "keep" and len(versions) > 1:
                    continue  # what kept KV does to later tokens is the engine contract's matter
                for version in versions:
                    expected = reference_logprobs(model_of(version), tokens, 1)
                    for at in (sampled & (log.versions == version)).nonzero()[0]:
                        assert log.logprobs[at] == pytest.approx(expected[at - 1], abs=2e-4), (episode, at)
            assert several > 0 or mode == "episode"
            assert logged == node.engine.counts().decode_tokens, "every token that was sampled is in a log"
            assert node.sync_metrics.value("segue_weight_sync_seconds", phase="probe") == updates + 1
            assert 0.0 < node.metrics.value("segue_weight_probe_gap_max_nats") < 1e-4
            counts = node.shell.counts()
            causes = {cause: n for cause, n in node.shell._ledger.prefilled.items() if n}
            assert sum(causes.values()) == counts["prefill_tokens"] == node.engine.counts().prefill_tokens
            assert counts["cached_tokens"] == node.engine.counts().cached_tokens > 0
            assert causes["first"] > 0 and causes["turn"] > 0
            assert causes.get("eviction", 0) > 0 or mode == "recompute"  # there an update has always come first
            assert (causes.get("weight_update", 0) > 0) == (mode != "keep"), causes
            assert w.scheduler.events.count(Paused(0, 1, "update")) == w.scheduler.events.count(Resumed(0, 1))
            seconds = node.shell._ledger.seconds
            assert sum(seconds.values()) == pytest.approx(node.engine.counts().prefill_seconds)

    run(main())


def test_an_interrupted_episode_samples_what_it_would_have(folder: str) -> None:
    """F26: the same weights under new version ids, loaded again and again: the same noise, the same tokens."""

    async def main(updates: int) -> list[list[int]]:
        async with World(config(rollout={"max_tokens": 200, "max_turn_tokens": 12}), nodes=0) as w:
            node = await start(w, folder, slots=4)
            weights, probe = named(model_of(1)), probe_of(model_of(1), PROBE)
            node.receiver.stage = lambda transfer, rank: asyncio.sleep(0, Staged(transfer.version, weights, probe=probe))
            for episode in range(4):
                await w.lease(episode, task=Task(f"t{episode}", "talk", episode, {"turns": 3}), group=episode)
            for _ in range(updates):
                await asyncio.sleep(0.11)
                await w.update()
            found = []
            for episode in range(4):
                log = (await w.scheduler.finished(episode)).log()
                assert sum(s.author == Author.ASSISTANT for s in log.segments) == 3
                found.append(log.tokens.tolist())
            assert updates == 0 or any(isinstance(e, Paused) for e in w.scheduler.events)
            return found

    assert run(main(6)) == run(main(0))


def test_updates_may_cross_each_its_own_way(folder: str) -> None:
    """As under `update.policy = "budget"`: kept KV is read on by those who have it, until an update drops it; stamps are true."""

    async def main() -> None:
        ways = ["recompute", "keep", "keep", "recompute", "turn", "keep", "recompute"]
        async with World(config(rollout={"max_tokens": 200, "max_turn_tokens": 12, "max_turns": 8}), nodes=0) as w:
            node = await start(w, folder, slots=8, chunk_tokens=1, decode_cost=0.03, prefill_cost_per_token=1e-5)
            for episode in range(EPISODES):
                await w.lease(episode, task=Task(f"t{episode}", "talk", episode, {"turns": 8}), group=episode)
            spent = []
            for way in ways:
                await asyncio.sleep(0.1)
                assert isinstance(await w.update(inflight=way, drain_seconds=0.05), Loaded)
                await asyncio.sleep(0.15)
                spent.append(node.shell.counts()["prefill_weight_update"])
            costs = [after - before for before, after in zip([0.0, *spent], spent, strict=False)]
            assert all((cost > 0) == (way != "keep") for way, cost in zip(ways, costs, strict=True)), costs
            kept = 0
            for episode in range(EPISODES):
                log = (await w.scheduler.finished(episode)).log()
                log.validate()
                tokens, sampled = log.tokens.tolist(), log.mask == 1
                clean = sampled & (log.versions == log.kv_versions)
                kept += int((sampled & ~clean).sum())
                assert set(log.versions[sampled & ~clean].tolist()) <= {3, 4, 7}, "only what was sampled after a keep"
                for version in sorted(set(log.versions[clean].tolist())):
                    expected = reference_logprobs(model_of(version), tokens, 1)
                    for at in (clean & (log.versions == version)).nonzero()[0]:
                        assert log.logprobs[at] == pytest.approx(expected[at - 1], abs=2e-4), (episode, at)
            assert kept > 0
            assert node.shell._ledger.total == node.engine.counts().prefill_tokens

    run(main())


def test_dropped_requests_are_in_the_ledger_too(folder: str) -> None:
    async def main() -> None:
        async with World(config(rollout={"max_tokens": 200, "max_turn_tokens": 12}), nodes=0) as w:
            node = await start(w, folder)
            for episode in range(EPISODES):
                await w.lease(episode, task=Task(f"t{episode}", "talk", episode, {"turns": 4}), group=EPISODES - episode)
            for episode in range(EPISODES):
                await asyncio.sleep(0.05)
                await w.scheduler.push(node.name, Drop(episode, 1, "redundant"))
                await w.scheduler.until(episode, lambda r: not r.leased)
            counts = node.engine.counts()
            assert node.shell._ledger.total == counts.prefill_tokens > 0 and node.shell._ledger.cached == counts.cached_tokens
            assert counts.running == counts.waiting == 0

    run(main())


def test_a_parked_episode_that_comes_back_finds_its_kv(folder: str) -> None:
    """Not where it comes back to another node: that is a migration."""

    async def main() -> None:
        async with World(config(rollout={"max_tokens": 200, "max_turn_tokens": 12}), nodes=0) as w:
            nodes = [await start(w, folder, name=f"rollout-{i}") for i in range(2)]
            assert isinstance(await w.update(nodes[1], version=w.version), Loaded)
            for episode, back in ((0, nodes[0]), (1, nodes[1])):
                await w.lease(episode, node=nodes[0], task=Task("t", "talk", episode, {"turns": 4}), group=episode)
                record = await w.scheduler.until(episode, lambda r: len(r.deltas) >= 4)
                await w.scheduler.push(nodes[0].name, ParkOrder(episode, 1))
                await w.scheduler.until(episode, lambda r: not r.leased)
                assert record.parked == 1
                await w.lease(episode, node=back)
                await w.scheduler.finished(episode)
            again = [node.shell._ledger.prefilled["migration"] for node in nodes]
            assert again[0] == 0 < again[1], again

    run(main())
