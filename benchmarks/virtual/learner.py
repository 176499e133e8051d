"""The modelled learner: follows the scheduler's protocol as `learner.shell` does, and sleeps where that one trains.

consumes       batches (`TAKE_BATCH`), `SEND_WEIGHTS` calls
produces       `TRAINED`, `COMMITTED`, `PUBLISH`, `TRANSFER_RESULT`; one line per step as metrics.jsonl has it
waits for      a batch, at most `learner.batch_wait_seconds`
unblocked by   the scheduler, which answers every question within `LONG_POLL_SECONDS`; the deadline, which ends the run
on cancel      transfers end

The ages of tokens, which of them train and the bound that it asserts are the learner's own (`learner.staleness`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

from benchmarks.virtual.scenario import LearnerModel
from benchmarks.virtual.weights import Hub
from learner.staleness import assert_bound, keep_mask, token_ages
from segue import wire
from segue.clock import now
from segue.config import Config
from segue.errors import RunFailed
from segue.metrics import Metrics, StateClock
from segue.ports.learner import (
    COMMITTED,
    PUBLISH,
    SEND_WEIGHTS,
    TAKE_BATCH,
    TRAINED,
    TRANSFER_RESULT,
    Batch,
    Committed,
    Publish,
    SendWeights,
    TakeBatch,
    TrainedReport,
)
from segue.ports.rpc import Done, Peer, PeerTimeout, Rpc, Service, ask
from segue.ports.transfer import Transfer
from segue.wire import Message

LONG_POLL_SECONDS = 10.0
CALL_SECONDS = 20.0
ADDRESS = "modelled"

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


_Array = tuple[str, tuple[int], bytes]
"""An array of one dimension as it travels (`segue.wire`). Those of an episode's deltas are joined before they become one."""


class _Log(msgspec.Struct, frozen=True):
    """What is needed of a `TokenLog`."""

    mask: _Array
    versions: _Array


class _Body(Message, frozen=True, tag="DeltaBody"):
    """What is needed of a `DeltaBody`."""

    log: _Log


_Body.kind = "DeltaBody"


class Work(msgspec.Struct, frozen=True):
    """What a batch holds. `stats` have the names of learner.batches; `ages[a]` counts trained tokens of age a; `starts` are the
    ages of the trajectories' first sampled tokens, trained or not, and `longest` is the most sampled tokens of one."""

    tokens: int
    ages: list[int]
    stats: dict[str, float]
    starts: list[int]
    longest: int


def read_batch(batch: Batch, config: Config) -> Work:
    """Count a batch's tokens. Raises `AssertionError` for one over age (promise 2), `ValueError` for a stamp that cannot be."""
    rule, masked = config.staleness, config.learner.mask_outcomes
    tokens = old = 0
    ages: Counter[int] = Counter()
    generated: list[int] = []
    trained: list[int] = []
    starts: list[int] = []
    mixed = outcome_masked = 0
    rewards: list[float] = []
    for member in (member for group in batch.groups for member in group.members):
        logs = [wire.decode(delta, _Body).log for delta in member.deltas]
        mask, versions = _joined([log.mask for log in logs]), _joined([log.versions for log in logs])
        valid = member.outcome not in masked
        age = token_ages(versions, mask, batch.version_steps, batch.step)
        keep = keep_mask(age, mask, rule.max_age, rule.over_age) if valid else np.zeros_like(mask)
        assert_bound(age, keep, rule.max_age, rule.over_age)
        sampled, kept = int(mask.sum()), int(keep.sum())
        starts.append(int(age[int(np.argmax(mask))]))
        ages.update(dict(enumerate(np.bincount(age[keep == 1]).tolist())))
        tokens += len(mask)
        generated.append(sampled)
        trained.append(kept)
        old += sampled - kept if valid else 0
        outcome_masked += sampled if not valid else 0
        used = versions[keep == 1]
        mixed += bool(kept) and bool((used != used[0]).any())
        rewards.append(member.reward)
    trains = sum(1 for n in trained if n)
    stats = {
        "reward_mean": float(np.mean(rewards)) if rewards else 0.0,
        "tokens_generated": float(sum(generated)),
        "tokens_trained": float(sum(trained)),
        "tokens_masked_age": float(old),
        "tokens_masked_outcome": float(outcome_masked),
        "trajectories": float(len(generated)),
        "trajectories_trained": float(trains),
        "trajectories_multi_version": float(mixed),
        "length_generated": sum(generated) / max(1, len(generated)),
        "length_trained": sum(trained) / max(1, trains),
    }
    return Work(tokens, [ages[a] for a in range(max(ages, default=-1) + 1)], stats, starts, max(generated, default=0))


def _joined(parts: list[_Array]) -> np.ndarray[Any, Any]:
    dtype = parts[0][0]
    assert all(part[0] == dtype for part in parts), "deltas of one episode have arrays of one kind"
    return np.frombuffer(b"".join([part[2] for part in parts]), dtype=dtype)


class ModelledLearner:
    """See the module. Built as a role is; `lines` are those of metrics.jsonl. `at_step(n)` is called when n steps are trained."""

    def __init__(
        self,
        config: Config,
        model: LearnerModel,
        unit: int,
        hub: Hub,
        metrics: Metrics,
        clock: StateClock,
        at_step: Callable[[int], None],
        updates: bool = True,
    ) -> None:
        self._config = config
        self._model = model
        self._per_token = model.seconds_per_token * unit
        self._hub = hub
        self._metrics = metrics
        self._clock = clock
        self._at_step = at_step
        self._updates = updates
        self._scheduler: Peer | None = None
        self._transfers: dict[int, asyncio.Task[None]] = {}
        self.version = -1
        self.lines: list[dict[str, Any]] = []
        self.works: list[Work] = []
        self._service = Service(self._failed)
        self._service.add(SEND_WEIGHTS, self._send_weights)

    def connect(self, name: str, peer: Peer) -> None:
        """Know the scheduler."""
        if name.startswith("scheduler"):
            self._scheduler = peer

    async def handle(self, method: str, body: bytes) -> bytes:
        """Answer a call."""
        self._metrics.add("segue_messages_received_total")
        return await self._service.handle(method, body)

    async def start(self) -> None:
        """Publish the weights of step 0."""
        await self._publish(0)
        self._clock.enter("other")

    async def run(self) -> None:
        """Train all steps. Raises `RunFailed` when no batch comes."""
        ended = now()
        for step in range(self._config.steps):
            self._clock.enter("wait_batch")
            began = now()
            batch = await self._batch(step)
            waited = now() - began
            if batch is None:
                return
            work = read_batch(batch, self._config)
            self.works.append(work)
            self._clock.enter("compute")
            seconds = self.step_seconds(work)
            await asyncio.sleep(seconds)
            self._count(work, waited, seconds)
            every = self._config.checkpoint.every
            saves = step + 1 == self._config.steps or (every > 0 and (step + 1) % every == 0)
            await self._ask(TRAINED, TrainedReport(step, {**work.stats, "wait_seconds": waited}, work.ages, cut=saves))
            self._line(step, now() - ended, waited, seconds, work)
            ended = now()
            self._at_step(step + 1)
            if saves:
                with self._clock.in_state("checkpoint"):
                    await asyncio.sleep(self._model.checkpoint_seconds)
                    await self._ask(COMMITTED, Committed(step + 1))
            if self._updates:
                await self._publish(step + 1)
        self._clock.enter("other")

    def step_seconds(self, work: Work) -> float:
        """What training a batch takes."""
        return self._model.step_seconds + self._per_token * work.tokens

    async def stop(self) -> None:
        """End the transfers."""
        for task in self._transfers.values():
            task.cancel()

    async def _batch(self, step: int) -> Batch | None:
        assert self._scheduler is not None, "connect comes first"
        deadline = now() + self._config.learner.batch_wait_seconds
        while True:
            reply = await ask(
                self._scheduler, TAKE_BATCH, TakeBatch(step, 0, LONG_POLL_SECONDS), LONG_POLL_SECONDS + CALL_SECONDS
            )
            if reply.batch is not None or reply.stop:
                return reply.batch
            if now() >= deadline:
                raise RunFailed(
                    "scheduler", f"No batch of step {step} came within {self._config.learner.batch_wait_seconds:g} s."
                )

    async def _publish(self, step: int) -> None:
        began = now()
        with self._clock.in_state("wait_publish"):
            await asyncio.sleep(self._model.gather_seconds)
            self.version = (await self._ask(PUBLISH, Publish(step, ADDRESS))).version
        self._metrics.observe("segue_learner_step_seconds", now() - began, phase="publish")

    async def _send_weights(self, request: SendWeights) -> Done:
        transfer = request.transfer
        if transfer.transfer not in self._transfers:
            task = asyncio.get_running_loop().create_task(self._transfer(transfer))
            self._transfers[transfer.transfer] = task
            for old in itertools.islice(list(self._transfers), max(0, len(self._transfers) - 64)):
                if self._transfers[old].done():
                    del self._transfers[old]
        return Done()

    async def _transfer(self, transfer: Transfer) -> None:
        await self._ask(TRANSFER_RESULT, await self._hub.send(transfer))

    async def _ask(self, rpc: Rpc[Q, R], request: Q) -> R:
        assert self._scheduler is not None, "connect comes first"
        try:
            return await ask(self._scheduler, rpc, request, CALL_SECONDS)
        except PeerTimeout as error:
            raise RunFailed("scheduler", f"The scheduler did not answer {rpc.name}: {error}.") from error

    def _count(self, work: Work, waited: float, seconds: float) -> None:
        self._metrics.observe("segue_learner_step_seconds", waited, phase="wait_batch")
        self._metrics.observe("segue_learner_step_seconds", seconds, phase="forward_backward")
        self._metrics.add("segue_learner_steps_total")
        self._metrics.add("segue_trained_tokens_total", work.stats["tokens_trained"])
        self._metrics.add("segue_masked_tokens_total", work.stats["tokens_masked_age"], reason="age")
        self._metrics.observe_counts("segue_token_staleness_versions", range(len(work.ages)), work.ages)

    def _line(self, step: int, seconds: float, waited: float, computed: float, work: Work) -> None:
        """As metrics.jsonl has it, but in exact times; what only the scheduler knows is left out."""
        times = {
            "elapsed_seconds": now(),
            "step_seconds": seconds,
            "wait_seconds": waited,
            "forward_backward_seconds": computed,
        }
        self.lines.append({"step": step, **times, "version": self.version, "ages": work.ages, **work.stats})

    def _failed(self, method: str, error: Exception) -> None:
        raise error
