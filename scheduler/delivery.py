"""Batches as the learner gets them: the core's plan with the payloads of the queue, encoded once for all ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from scheduler.core.commands import BatchPlan
from scheduler.queue import LogReader, TrajectoryQueue
from segue import wire
from segue.clock import Compute
from segue.ports.learner import Batch, BatchReply, GroupPayload, MemberPayload


class Delivery:
    """Formed batches by step, until they are committed. The bytes of the newest one asked for are kept for the other ranks."""

    def __init__(
        self, queue: TrajectoryQueue, temperature: float, steps_of: Callable[[Sequence[int]], dict[int, int]], compute: Compute
    ) -> None:
        self._queue = queue
        self._temperature = temperature
        self._steps_of = steps_of
        self._compute = compute
        self.plans: dict[int, BatchPlan] = {}
        self._encoded: tuple[int, dict[int, int], bytes] | None = None
        self._encoding = asyncio.Lock()

    async def encoded(self, step: int) -> bytes:
        """The encoded `BatchReply` of a step. Reading and encoding may take long, so they run off the loop."""
        plan = self.plans[step]
        steps = self._steps_of(plan.versions)
        async with self._encoding:  # the other ranks ask at the same time, and want the same bytes
            if self._encoded is None or self._encoded[:2] != (step, steps):
                readers = {m.episode: self._queue.reader(m.episode) for group in plan.groups for m in group.members}
                body = await self._compute.run(lambda: self._encode(plan, steps, readers), cost=0.0)
                self._encoded = (step, steps, body)
            return self._encoded[2]

    def _encode(self, plan: BatchPlan, steps: dict[int, int], readers: dict[int, LogReader]) -> bytes:
        groups = [
            GroupPayload(
                group=group.group,
                task=group.task,
                size=group.size,
                temperature=self._temperature,
                members=[
                    MemberPayload(
                        episode=member.episode,
                        member=member.member,
                        outcome=member.outcome,
                        reward=member.reward,
                        deltas=readers[member.episode](),
                        seconds=member.seconds,
                        info=member.info,
                    )
                    for member in group.members
                ],
            )
            for group in plan.groups
        ]
        return wire.encode(BatchReply(Batch(plan.step, groups, steps)))

    def release(self, step: int) -> None:
        """The batch is committed."""
        self.plans.pop(step, None)
        if self._encoded is not None and self._encoded[0] == step:
            self._encoded = None
