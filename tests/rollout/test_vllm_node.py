"""A node with vLLM: what is logged is what the weights say, version by version, in every in-flight mode; and the causes sum."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from typing import Any

import chat_tokenizers as made
import pytest
import pytest_asyncio
import torch
from engine_contract import DEADLINE
from engine_models import named, probe_of, prompt, reference_logprobs
from node_world import Node, World, config
from vllm_harness import MAX_TOKENS, SLOTS, Cores, Progress, leave, model_of
from vllm_weights import SentReceiver

from segue.episode import Task
from segue.ports.rollout import Loaded
from segue.ports.weights import Probe

pytestmark = [
    pytest.mark.processes,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
FIVE_OR_FIFTY = [(6, 5), pytest.param((3, 50), marks=pytest.mark.full)]
"""(episodes that begin before each update, updates)"""
PROBE = prompt(7, 64)


def published(version: int) -> tuple[dict[str, torch.Tensor], Probe]:
    """The real weights of a version, and what they make of the probe."""
    model = model_of(version, False)
    return named(model), probe_of(model, PROBE)


@pytest_asyncio.fixture(loop_scope="session")
async def core(cores: Cores) -> AsyncIterator[Any]:
    core = await cores.get(False)
    yield core
    await leave(core)


async def start(w: World, cores: Cores, core: Any) -> tuple[Node, Progress]:
    from rollout.vllm.engine import VllmEngine

    engine = VllmEngine(
        core,
        cores.model(False),
        slots=SLOTS,
        max_tokens=MAX_TOKENS,
        score_tokens=MAX_TOKENS,
        chunk_tokens=4,
        tokenizer=made.words(),
        owns_core=False,
    )
    node = await w.add_node("rollout-0", engine=engine, receiver=SentReceiver("rollout-0", engine, published))
    return node, Progress(engine, core)


@pytest.mark.parametrize("load", FIVE_OR_FIFTY, ids=lambda load: str(load[1]))
@pytest.mark.parametrize("mode", ["recompute", "keep", "turn", "episode"])
async def test_every_token_has_the_log_probability_of_the_weights_it_names(
    mode: str, load: tuple[int, int], cores: Cores, core: Any
) -> None:
    """F01, F16, F26, F41: more episodes than slots, updates under load, sent to vLLM's workers while they
    decode, each proved by the probe; and the ledger's sum."""
    cfg = config(update={"inflight": mode}, rollout={"max_tokens": MAX_TOKENS, "max_turn_tokens": 12, "max_episodes": 40})
    new, updates = load
    async with asyncio.timeout(2 * DEADLINE + 4 * updates), World(cfg, nodes=0) as w:
        node, progress = await start(w, cores, core)
        for update in range(updates):
            for episode in range(new * update, new * (update + 1)):  # there is always somebody who samples
                await w.lease(episode, task=Task(f"t{episode // 2}", "talk", episode // 2, {"turns": 5}), group=episode // 2)
            await progress.more(20)
            assert isinstance(await w.update(drain_seconds=0.05), Loaded)
        several = logged = 0
        for episode in range(new * updates):
            log = (await w.scheduler.finished(episode)).log()
            log.validate()
            tokens, sampled = log.tokens.tolist(), log.mask == 1
            versions = sorted(set(log.versions[sampled].tolist()))
            several += len(versions) > 1
            logged += int(sampled.sum())
            if mode == "keep" and len(versions) > 1:
                continue  # what kept KV does to later tokens: test_vllm_keep.py
            for version in versions:
                expected = reference_logprobs(model_of(version, False), tokens, 1)
                for at in (sampled & (log.versions == version)).nonzero()[0]:
                    assert log.logprobs[at] == pytest.approx(expected[at - 1], abs=1e-4), (episode, at)
        assert several > 0
        assert logged == node.engine.counts().decode_tokens, "every token that was sampled is in a log"
        assert node.sync_metrics.value("segue_weight_sync_seconds", phase="probe") == updates + 1
        assert 0.0 < node.metrics.value("segue_weight_probe_gap_max_nats") < 1e-4
        counts = node.shell.counts()
        causes = {cause: n for cause, n in node.shell._ledger.prefilled.items() if n}
        assert sum(causes.values()) == counts["prefill_tokens"] == node.engine.counts().prefill_tokens
        assert counts["cached_tokens"] == node.engine.counts().cached_tokens
        assert causes["first"] > 0 and causes["turn"] > 0
        assert counts["cached_tokens"] > 0 and causes["block"] > 0
        assert (causes.get("weight_update", 0) > 0) == (mode != "keep"), causes
