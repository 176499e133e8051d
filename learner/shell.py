"""The shell of a learner rank: takes batches, trains them, reports, checkpoints, publishes.

consumes       prepared batches (`learner.feed`), `SEND_WEIGHTS` calls (rank 0, whose sender tells the other ranks' sources)
produces       `TRAINED`, `COMMITTED`, `PUBLISH`, `TRANSFER_RESULT` (rank 0); checkpoints, sampled trajectories, metrics
waits for      batches; the scheduler's answers; the other ranks, in collectives that fail at a deadline
unblocked by   the feed's deadline, the calls' time-outs, the collectives' time-out; each ends the run with its cause
on cancel      `stop`: the step under way is finished, all ranks agree to end, a checkpoint is written, `run` returns

All torch work runs in one `Compute`, in order: with several ranks that order is what keeps their collectives in step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch

from learner.batches import PreparedBatch
from learner.checkpoints import model_folder, open_checkpoint, read_tokenizer, write_checkpoint
from learner.feed import BatchFeed, scheduler_failed
from learner.model import POLICY, full_tensors, load_model, meta_tensors, shard
from learner.probe import draw_probe, score_probe, vocabulary_of
from learner.reports import TrajectorySamples, record_step
from learner.state import gather_state, restore_state
from learner.trainer import NotFinite, StepStats, Trainer, trainer_class
from learner.world import alone, any_rank, from_first, join_world, leave_world, text_from_first, together
from segue.clock import Compute, LogicalCompute, ThreadCompute, now
from segue.config import Config
from segue.errors import RunFailed, WireError
from segue.metrics import Metrics, StateClock
from segue.ports.learner import (
    COMMITTED,
    PUBLISH,
    SEND_WEIGHTS,
    TRAINED,
    TRANSFER_RESULT,
    Committed,
    Publish,
    SendWeights,
    TrainedReport,
)
from segue.ports.rpc import Done, Peer, PeerLost, PeerTimeout, RemoteError, Rpc, Service, ask
from segue.ports.transfer import Transfer
from segue.ports.weights import FurtherSource, WeightSender, WeightSource
from segue.wire import Message

CALL_SECONDS = 20.0
CALL_ATTEMPTS = 3
"""Calls that change something at the scheduler are repeated after a time-out: it answers a repetition like the first."""

_STATE_OF_PHASE = {"proximal": "compute", "forward_backward": "compute", "optimizer": "optimizer"}

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
T = TypeVar("T")

log = logging.getLogger(__name__)


class LearnerShell:
    """See the module.

    config, run_dir  the resolved config, and where checkpoints and trajectories go
    rank, world      this rank of `world`; rank 0 reports, saves and publishes
    model_path       Hugging Face folder to start from; not read on a resume (checkpoints have model and tokenizer)
    sender           rank 0's weight sender; on the others their source of weights
    metrics, clock   registry of role learner; its states
    resume           a checkpoint folder to go on from
    rendezvous       "host:port" where several ranks meet (rank 0 listens)
    compute          where torch work runs: a thread of its own, or `LogicalCompute` in serial mode
    prefetch         prepare the next batch in a thread while the current one trains; False in serial mode
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        rank: int,
        world: int,
        model_path: str,
        sender: WeightSender | FurtherSource,
        metrics: Metrics,
        clock: StateClock,
        resume: Path | None = None,
        *,
        rendezvous: str = "",
        compute: Compute | None = None,
        prefetch: bool = True,
    ) -> None:
        self.config = config
        self.rank = rank
        self.world = world
        self.version: int | None = None
        self._run_dir = run_dir
        self._model_path = str(model_folder(resume)) if resume is not None else model_path
        self._source: WeightSource = sender
        self._sender: WeightSender | None = cast("WeightSender", sender) if rank == 0 else None
        self._serving: asyncio.Task[None] | None = None
        self._metrics = metrics
        self._clock = clock
        self._resume = resume
        self._rendezvous = rendezvous
        self._compute = compute or ThreadCompute("learner")
        self._prefetch = prefetch
        self._samples: TrajectorySamples | None = None
        self._tokenizer: dict[str, bytes] = {}
        self._probe: list[int] = []
        self._scheduler: Peer | None = None
        self._trainer: Trainer | None = None
        self._feed: BatchFeed | None = None
        self._saved_step = -1
        self._waited = 0.0
        self._cut: bytes | None = None
        self._stopping = False
        self._ended = asyncio.Event()
        self._transfers: dict[int, asyncio.Task[None]] = {}
        self._service = Service(self._service_error)
        self._service.add(SEND_WEIGHTS, self._send_weights)

    # --- the life of a role -----------------------------------------------------------------------------------------

    def connect(self, name: str, peer: Peer) -> None:
        """Know a peer. The learner talks to the scheduler alone; the others' peers are not kept."""
        if name.partition("-")[0] == "scheduler":
            self._scheduler = peer

    async def handle(self, method: str, body: bytes) -> bytes:
        """Answer a call; never raises."""
        self._metrics.add("segue_messages_received_total")
        return await self._service.handle(method, body)

    async def start(self) -> None:
        """Load the model or the checkpoint and publish its weights. Raises `UserError`, `RunFailed`."""
        self._clock.enter("compute")
        self._trainer = await self._in_order(self._load)
        self._saved_step = self._trainer.step if self._resume is not None else -1
        if self.world > 1:
            address = await self._in_order(lambda: text_from_first(self._sender.address if self._sender is not None else ""))
            if self._sender is None:
                serving = cast("FurtherSource", self._source).serve(address)
                self._serving = asyncio.get_running_loop().create_task(serving, name="weight source")
                self._serving.add_done_callback(self._transfer_ended)
        await self._publish()
        self._clock.enter("other")

    async def run(self) -> None:
        """Train until all steps are done or `stop` was called. Raises `RunFailed` with the first cause."""
        assert self._trainer is not None and self._scheduler is not None, "start comes first"
        self._feed = BatchFeed(self.config, self.rank, self.world, self._scheduler, self._compute, self._metrics, self._prefetch)
        if self._stopping:
            self._feed.stop()
        self._feed.start(self._trainer.step)
        try:
            while self._trainer.step < self.config.steps:
                batch = await self._next_batch(self._trainer.step)
                if batch is None:
                    await self._checkpoint()
                    break
                await self._step(batch)
        finally:
            self._clock.enter("other")
            await self._feed.close()
            self._ended.set()

    async def stop(self) -> None:
        """End after the step under way, with a checkpoint; idempotent. Raises `RunFailed` if that takes too long."""
        self._stopping = True
        if self._feed is not None:
            self._feed.stop()
            # Other ranks may have to get their batch first, to find together that this is the end.
            limit = self.config.cluster.stop_seconds + self.config.learner.batch_wait_seconds
            try:
                await asyncio.wait_for(self._ended.wait(), limit)
            except TimeoutError:
                raise RunFailed(
                    f"learner-{self.rank}",
                    f"Learner rank {self.rank} did not end its step within {limit:g} s of being told to stop.",
                ) from None
        for task in list(self._transfers.values()):
            task.cancel()
        if self._serving is not None:
            self._serving.cancel()
        self._source.close()
        self._compute.close()
        if self.world > 1:
            leave_world()

    # --- one step -----------------------------------------------------------------------------------------------------

    async def _next_batch(self, step: int) -> PreparedBatch | None:
        """The batch of `step`; None when there will be none, which all ranks find together."""
        assert self._feed is not None
        self._clock.enter("wait_batch")
        began = now()
        there = await self._feed.wait(step)
        if self.world > 1:
            there = not await self._in_order(lambda: any_rank(not there))
        self._waited = now() - began
        self._metrics.observe("segue_learner_step_seconds", self._waited, phase="wait_batch")
        if not there:
            return None
        self._clock.enter("compute")
        began = now()
        batch = await self._feed.take()
        self._metrics.observe("segue_learner_step_seconds", now() - began, phase="prepare")
        return batch

    async def _step(self, batch: PreparedBatch) -> None:
        trainer = self._trainer
        assert trainer is not None
        done = await self._train(trainer, batch)
        if self.rank == 0:
            began = now()
            record_step(self._metrics, self.config.task.env, done)
            if self._samples is not None:
                self._samples.write(batch)
            # The cut is small, and a stop can make a checkpoint of any step: it is taken with every acknowledgement.
            seconds = {f"{phase}_seconds": value for phase, value in done.seconds.items()}
            report = TrainedReport(done.step, {**done.stats, **seconds, "wait_seconds": self._waited}, done.ages, cut=True)
            self._cut = (await self._ask(TRAINED, report)).cut
            self._metrics.observe("segue_learner_step_seconds", now() - began, phase="report")
        every = self.config.checkpoint.every
        if trainer.step == self.config.steps or (every > 0 and trainer.step % every == 0):
            await self._checkpoint()
        if done.updated:
            await self._publish()

    async def _train(self, trainer: Trainer, batch: PreparedBatch) -> StepStats:
        # On a logical clock the step's seconds pass after its work, all in one state: which phase took them is not known.
        logical = isinstance(self._compute, LogicalCompute)
        enter: Callable[[str], None] = lambda phase: None if logical else self._clock.enter(_STATE_OF_PHASE[phase])  # noqa: E731
        try:
            return await self._in_order(
                lambda: trainer.train(batch, self.version, enter), self.config.serial.learner_step_seconds
            )
        except NotFinite as error:
            raise RunFailed(
                f"learner-{self.rank}", f"Training diverged: {error}; lower learner.lr and resume from the newest checkpoint."
            ) from error
        finally:
            self._clock.enter("other")

    # --- checkpoints --------------------------------------------------------------------------------------------------

    async def _checkpoint(self) -> None:
        """Save the weights of the step reported last with the scheduler's cut at that acknowledgement; once per step."""
        trainer = self._trainer
        assert trainer is not None
        if trainer.step in (0, self._saved_step):
            return
        began = now()
        with self._clock.in_state("checkpoint"):
            state = await self._in_order(lambda: gather_state(trainer, keep=self.rank == 0))
            self._saved_step = trainer.step
            if state is not None:
                cut, keep = self._cut, self.config.checkpoint.keep
                assert cut is not None, "the scheduler gave no cut"
                path = await self._in_order(lambda: write_checkpoint(self._run_dir, state, cut, self._tokenizer, keep))
                await self._ask(COMMITTED, Committed(trainer.step))
                log.info("checkpoint %s", path)
        self._metrics.observe("segue_learner_step_seconds", now() - began, phase="checkpoint")

    # --- weights ------------------------------------------------------------------------------------------------------

    async def _publish(self) -> None:
        """Gather the weights, each rank the share that it sends, and announce them; every rank learns their version id."""
        trainer = self._trainer
        assert trainer is not None
        began = now()
        with self._clock.in_state("wait_publish"):
            await self._in_order(lambda: self._gather(trainer))
            version = -1
            if self._sender is not None:
                reply = await self._ask(PUBLISH, Publish(trainer.step, self._sender.address))
                version = reply.version
            self.version = await self._in_order(lambda: from_first(version)) if self.world > 1 else version
        self._metrics.set("segue_policy_version", self.version)
        self._metrics.set("segue_policy_update_timestamp_seconds", time.time())
        self._metrics.observe("segue_learner_step_seconds", now() - began, phase="publish")

    def _gather(self, trainer: Trainer) -> None:
        probe = score_probe(trainer.policy, self._probe) if self._probe else None
        named = meta_tensors(trainer.policy)
        named |= full_tensors(trainer.policy, self._source.share(named))
        self._source.publish(trainer.step, named, probe)

    async def _send_weights(self, request: SendWeights) -> Done:
        """Start a transfer; its outcome is reported by a call of its own. A repeated request is the same transfer."""
        assert self._sender is not None, "only rank 0 sends weights"
        transfer = request.transfer
        if transfer.transfer not in self._transfers:
            work = self._transfer(self._sender, transfer)
            task = asyncio.get_running_loop().create_task(work, name=f"transfer {transfer.transfer}")
            self._transfers[transfer.transfer] = task
            task.add_done_callback(self._transfer_ended)
        return Done()

    async def _transfer(self, sender: WeightSender, transfer: Transfer) -> None:
        await self._ask(TRANSFER_RESULT, await sender.send(transfer))

    def _transfer_ended(self, task: asyncio.Task[None]) -> None:
        """A transfer that could not even be reported ends the run; after training there is only the log to tell."""
        for old in sorted(self._transfers)[:-64]:  # repeated requests come soon or never
            if self._transfers[old].done():
                del self._transfers[old]
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        log.error("%s failed", task.get_name(), exc_info=error)
        if self._feed is not None and isinstance(error, Exception):
            self._feed.fail(error)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _load(self) -> Trainer:
        config = self.config
        torch.set_num_threads(config.learner.threads)
        torch.manual_seed(config.seed)
        cuda = config.learner.gpus > 0 and torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        if self.world > 1:
            meet = config.cluster.start_seconds
            join_world(self.rank, self.world, self._rendezvous, meet, config.learner.batch_wait_seconds + meet, cuda)
        elif config.learner.dtype != "float32":
            alone()
        checkpoint = open_checkpoint(self._resume) if self._resume is not None else None
        model = load_model(self._model_path, config.learner.logprob_chunk_tokens, device)
        if self.world > 1 or config.learner.dtype != "float32":
            shard(model, config.learner.dtype)
        tokenizer = read_tokenizer(self._model_path)
        if config.weightsync.probe_tokens:
            vocabulary, special = vocabulary_of(model, tokenizer)
            self._probe = draw_probe(vocabulary, special, config.weightsync.probe_tokens, config.seed)
        if self.rank == 0:
            self._tokenizer = tokenizer
            self._samples = TrajectorySamples(self._run_dir, self._tokenizer, config.seed, config.rollout.keep_trajectories)
        trainer = trainer_class(config)({POLICY: model}, config, self.world)
        if checkpoint is not None:
            restore_state(trainer, checkpoint, self.rank)
        return trainer

    async def _in_order(self, work: Callable[[], T], cost: float = 0.0) -> T:
        """Torch work, after all that was asked for before. Raises `RunFailed` when another rank is missing in it."""

        def run() -> T:
            with together():
                return work()

        return await self._compute.run(run, cost)

    async def _ask(self, rpc: Rpc[Q, R], request: Q) -> R:
        """A call that the run cannot go on without. Raises `RunFailed` naming the scheduler."""
        assert self._scheduler is not None, "connect comes first"
        for attempt in range(1, CALL_ATTEMPTS + 1):
            try:
                return await ask(self._scheduler, rpc, request, CALL_SECONDS)
            except PeerTimeout as error:
                self._metrics.add("segue_rpc_failures_total", reason="timeout")
                if attempt == CALL_ATTEMPTS:
                    raise scheduler_failed(self._metrics, rpc.name, error) from error
            except (PeerLost, RemoteError, WireError) as error:
                raise scheduler_failed(self._metrics, rpc.name, error) from error
        raise AssertionError("unreachable")

    def _service_error(self, method: str, error: Exception) -> None:
        log.error("the call %s failed", method, exc_info=error)
