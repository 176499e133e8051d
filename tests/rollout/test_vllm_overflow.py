"""A context that is full in mid-episode, on vLLM: the episode is truncated and says so; nothing that was sampled is lost."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import pytest
from engine_contract import DEADLINE
from node_world import World, config
from test_vllm_node import core, start
from vllm_harness import Cores

from segue.episode import Outcome, Task
from segue.trajectory import Author

__all__ = ["core"]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
MOST = 60


async def test_a_full_context_truncates_the_episode_and_loses_nothing(cores: Cores, core: Any) -> None:
    """In the middle of an action, and behind an observation that leaves no room; its turn is closed, its reward counted."""
    cfg = config(rollout={"max_tokens": MOST, "max_turn_tokens": 14, "max_turns": 20})
    async with asyncio.timeout(DEADLINE), World(cfg, nodes=0) as w:
        node, _ = await start(w, cores, core)
        replies = ["the lamp {}", " ".join(["the lamp is on the table in the hall"] * 4) + " {}"]
        for episode in range(6):
            task = Task(f"t{episode}", "talk", episode, {"turns": 50, "reply": replies[episode % 2], "reward": 0.5})
            await w.lease(episode, task=task)
        logged = 0
        for episode in range(6):
            record = await w.scheduler.finished(episode)
            finish, log = record.finish, record.log()
            assert finish is not None and not record.fails
            log.validate()
            assert finish.outcome == Outcome.TRUNCATED_TOKENS and finish.turns >= 1
            assert len(log) <= MOST and finish.reward == 0.5 * finish.turns
            actions = [segment for segment in log.segments if segment.author == Author.ASSISTANT]
            assert actions and all(segment.turn <= finish.turns for segment in actions)
            logged += int(log.mask.sum())
        assert logged == node.engine.counts().decode_tokens, "every token that was sampled is in a log"
