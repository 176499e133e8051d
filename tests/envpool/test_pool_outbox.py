"""A pool's replies to a node: in order, together where the node is patient, at once where it is not."""

from __future__ import annotations

import asyncio

from envpool.outbox import Outbox
from segue import wire
from segue.clock import LogicalLoop, now
from segue.metrics import Metrics
from segue.ports.envpool import EnvDeliver, EnvFailed
from segue.ports.rpc import Done


class Node:
    """Acknowledges what is delivered, and remembers when it came."""

    name = "rollout-0"

    def __init__(self) -> None:
        self.batches: list[tuple[float, list[int]]] = []

    async def call(self, method: str, body: bytes, timeout: float) -> bytes:
        self.batches.append((now(), [reply.episode for reply in wire.decode(body, EnvDeliver).replies]))
        return wire.encode(Done())


def reply(episode: int) -> EnvFailed:
    return EnvFailed(episode, 1, 0, "env", "error", "")


async def replies(patience: float) -> list[tuple[float, list[int]]]:
    """Episode 0 at once, 1 after 0.01 s, 2 and 3 after 0.03 s."""
    node = Node()
    broken: list[object] = []
    outbox = Outbox(
        "envpool-0", node, 1, Metrics("envpool", envs=("talk",)), 30.0, lambda: broken.append("silent"), broken.append
    )
    outbox.patience = patience
    for seconds, episodes in ((0.0, [0]), (0.01, [1]), (0.02, [2, 3])):
        await asyncio.sleep(seconds)
        for episode in episodes:
            outbox.put(reply(episode))
    await asyncio.sleep(1.0)
    assert not broken
    return [(round(at, 3), episodes) for at, episodes in node.batches]


def test_replies_gather_as_long_as_the_node_is_patient() -> None:
    with asyncio.Runner(loop_factory=LogicalLoop) as runner:
        assert runner.run(replies(0.05)) == [(0.0, [0]), (0.05, [1, 2, 3])]


def test_an_impatient_node_gets_each_reply_at_once() -> None:
    with asyncio.Runner(loop_factory=LogicalLoop) as runner:
        assert runner.run(replies(0.0)) == [(0.0, [0]), (0.01, [1]), (0.03, [2, 3])]
