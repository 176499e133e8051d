"""The scheduler's shell: gives the core its messages, its clock and its hands.

Consumes: exchanges of rollout nodes; publish, take_batch, trained, committed and transfer_result of the learner; the driver's
calls; the core's timers. Waits for: the journal, before anything is acknowledged or carried out; a batch or an event, at most
as long as the caller said; the learner and the nodes, each call with a time-out. Unblocked by: the next commit, `stop`.
Produces: replies, orders, send_weights, run events, metrics. On cancel or stop: every waiter is released with the reason.

One commit is: the core handles the events of one message at one moment (no await), the queue stores what was accepted, orders
are built; then the records go to the journal; then, in the order of the commits, orders are sent and waiters woken.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from scheduler.carry_out import CarryOut
from scheduler.core import SchedulerCore
from scheduler.core import events as e
from scheduler.core.commands import Command
from scheduler.core.restart import CoreCut
from scheduler.delivery import Delivery
from scheduler.errors import CallRefused
from scheduler.exchanges import Exchanges
from scheduler.ids import VersionLedger
from scheduler.queue import TrajectoryQueue
from scheduler.report import Report
from scheduler.run_events import RunEvents
from scheduler.tasks import TaskStream
from segue import wire
from segue.clock import Compute, ThreadCompute
from segue.clock import now as loop_now
from segue.config import Config
from segue.episode import Task
from segue.errors import RunFailed, UserError, WireError
from segue.metrics.registry import Metrics
from segue.metrics.states import StateClock
from segue.ports import driver as driver_port
from segue.ports import learner as learner_port
from segue.ports import rollout as rollout_port
from segue.ports import transfer as transfer_port
from segue.ports.journal import Journal, MemoryJournal, Record
from segue.ports.rpc import Done, Failure, Peer, Service
from segue.rundir import RunDir
from segue.wire import Message

log = logging.getLogger(__name__)

SENDER = "learner-0"
EXPORT_SECONDS = 0.25
"""The metrics are brought up to date with what happens, but not more often than this."""
_body: ContextVar[bytes] = ContextVar("body", default=b"")


class ShellCut(Message, frozen=True):
    """The scheduler's part of a checkpoint: the core's, and the position of the task stream."""

    core: CoreCut
    stream: dict[str, Any]


class SchedulerShell:
    """See the module. `tasks` are the training tasks; `compute` runs file work and encoding (a thread by default)."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        tasks: Sequence[Task],
        metrics: Metrics,
        clock: StateClock,
        journal: Journal | None = None,
        compute: Compute | None = None,
    ) -> None:
        self._config = config
        self.clock = clock
        self._journal = journal or MemoryJournal()
        self.compute = compute or ThreadCompute("scheduler-io")
        self.core = SchedulerCore(config, task_count=len(tasks))
        self._run_dir = run_dir
        self.queue = TrajectoryQueue(run_dir / "queue", config.queue.bytes)
        self._stream = TaskStream(tasks, config.seed, config.data.shuffle)
        self._ledger = VersionLedger(run_dir / "journal" / "next_version")
        self.delivery = Delivery(self.queue, config.rollout.temperature, self.core.version_steps, self.compute)
        self.events = RunEvents()
        self.report = Report(config, self.core, self.queue, metrics)
        self.exchanges = Exchanges(self, config)
        self._carry_out = CarryOut(self, config)
        self._commits = asyncio.Lock()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Handle | None = None  # no TimerHandle from uvloop, where the time has come already
        self._timer_due = 0.0
        self._spilling = False
        self._exported_at = float("-inf")
        self._cut: tuple[int, bytes] | None = None
        self._over: asyncio.Future[None] | None = None
        self._closing = False
        self.stopped = ""
        self.sender: Peer | None = None
        self.service = Service(self._on_error)
        self._route()

    # --- life -----------------------------------------------------------------------------------------------------------

    def restore(self, cut: bytes) -> None:
        """Go on from a checkpoint. Before `start`. Raises a `WireError` if the bytes are no cut."""
        loaded = wire.decode(cut, ShellCut)
        self.core.restore(loaded.core, self._ledger.next_id())
        self._stream.restore(loaded.stream)

    def connect(self, name: str, peer: Peer) -> None:
        """Give the shell a way to a rollout node, or to the learner's rank 0; others are none of its business."""
        if name == SENDER:
            self.sender = peer
        elif name.startswith("rollout-"):
            self.exchanges.connect(name, peer)

    async def start(self) -> None:
        """Ready for calls."""
        self._over = asyncio.get_running_loop().create_future()
        self.core.tables.versions.next_id = max(self.core.tables.versions.next_id, self._ledger.next_id())
        self._idle()

    async def run(self) -> None:
        """Until `stop`. Raises `RunFailed` when the run cannot go on."""
        assert self._over is not None, "start first"
        await asyncio.shield(self._over)

    async def stop(self) -> None:
        """Release every waiter and end all tasks."""
        self._closing = True
        self.release(self.stopped or "the scheduler stops")
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.report.export()
        await self._journal.close()
        self.compute.close()
        self.queue.close()
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    async def handle(self, method: str, body: bytes) -> bytes:
        """Answer one call."""
        _body.set(body)
        self.core.tables.tally.count("received")
        if method == learner_port.TAKE_BATCH.name:
            return await self._take_batch(body)
        return await self.service.handle(method, body)

    def _route(self) -> None:
        add = self.service.add
        add(rollout_port.EXCHANGE, self.exchanges.exchange)
        add(learner_port.TRAINED, self._trained)
        add(learner_port.PUBLISH, self._publish)
        add(learner_port.COMMITTED, self._committed)
        add(learner_port.TRANSFER_RESULT, self._transfer_result)
        add(driver_port.OPEN_TRAINING, self._open_training)
        add(driver_port.START_EVAL, self._start_eval)
        add(driver_port.EVAL_STATE, self._eval_state)
        add(driver_port.WATCH_EVENTS, self._watch_events)
        add(driver_port.GET_STATUS, self._get_status)
        add(driver_port.STOP_RUN, self._stop_run)

    def _on_error(self, method: str, error: Exception) -> None:
        log.error("%s was answered with an error: %s", method, error, exc_info=error)
        if not isinstance(error, (CallRefused, WireError)):  # not the caller's mistake but ours: nothing can be trusted any more
            self._broken(error)

    # --- commits --------------------------------------------------------------------------------------------------------

    def take(self, event: e.Event, now: float) -> tuple[Sequence[Command], list[Callable[[], None]]]:
        """The core takes in one event and its commands are carried out, except for what must wait for the journal."""
        commands = self.core.handle(event, now)
        return commands, self._carry_out(commands, now)

    async def commit(self, method: str, events: Sequence[e.Event], body: bytes | None = None) -> None:
        """Handle events that are one message, write it down, then let its effects out."""
        now = loop_now()
        with self.clock.in_state("dispatch"):
            after = [thunk for event in events for thunk in self.take(event, now)[1]]
        await self.settle(method, now, after, body)

    async def settle(self, method: str, now: float, after: list[Callable[[], None]], body: bytes | None = None) -> None:
        """Write down what came in, and then let out what followed from it."""
        if body is None:
            body = _body.get()
        self._arm()
        async with self._commits:  # first come, first served: effects leave in the order of the decisions
            await self._journal.append([Record(now, method, body)])
            self.core.tables.tally.count("journal_records")
            if after:
                with self.clock.in_state("dispatch"):
                    for thunk in after:
                        thunk()
        self._idle()
        if loop_now() >= self._exported_at + EXPORT_SECONDS:
            self._exported_at = loop_now()
            self.report.export()
        self._spill()

    def _arm(self) -> None:
        """One timer, at the core's next deadline."""
        due = self.core.next_deadline()
        if self._timer is not None:
            if due == self._timer_due:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None and not self.failed:
            self._timer_due = due
            self._timer = asyncio.get_running_loop().call_at(due, self._due)

    def _due(self) -> None:
        self._timer = None
        self.spawn(self._tick())

    async def _tick(self) -> None:
        now = loop_now()
        with self.clock.in_state("dispatch"):
            after = self._carry_out(self.core.tick(now), now)
        await self.settle("tick", now, after, b"")

    def draw_tasks(self, count: int, now: float) -> Sequence[Command]:
        """Give the core tasks from the stream; what it wants done then is part of the commit that needed them."""
        return self.core.handle(e.TasksArrived(self._stream.take(count)), now)

    def _idle(self) -> None:
        self.clock.enter(self.core.waits_for())

    # --- waking, failing ------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something changed that somebody may wait for; each waiter looks again for itself."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until `ready` or the time is up; says which."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not ready() and not self._closing:
                    await self._changed.wait()
        return ready()

    def release(self, reason: str) -> None:
        """There will be no more batches; whoever waits is told why."""
        if not self.stopped:
            self.stopped = reason
            self.events.add("stopped", {"reason": reason})
        self.wake()

    def fail_users(self, part: str, what: str, remedy: str, raised: bool) -> None:
        """The run cannot go on, because of the user's environment or its data; where the traceback is comes before the remedy."""
        traceback = f"{RunDir(self._run_dir).env_log()} has the traceback; " if raised else ""
        self.fail(part, f"{what}: {traceback}{remedy}.", users=True)

    def fail(self, part: str, sentence: str, users: bool = False) -> None:
        """The run cannot go on; `users`: it is the user's to mend."""
        if self.failed:
            return
        log.error("%s: %s", part, sentence)
        self.events.add("fatal", {"part": part, "sentence": sentence} | ({"users": True} if users else {}))
        self.release(sentence)
        if self._over is not None and not self._over.done():
            self._over.set_exception(UserError(sentence) if users else RunFailed(part, sentence))
            self._over.exception()  # looked at here, in case nobody awaits `run`

    @property
    def failed(self) -> bool:
        """Whether `fail` was called."""
        return self._over is not None and self._over.done() and not self._over.cancelled() and self._over.exception() is not None

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside; if it raises, the run ends and says why."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken(error)

    def _broken(self, error: BaseException) -> None:
        if isinstance(error, RunFailed):
            self.fail(error.part, error.sentence)
        else:
            log.error("the scheduler failed", exc_info=error)
            self.fail("scheduler", f"The scheduler failed: {type(error).__name__}: {error} (its log has the traceback).")

    # --- spilling -------------------------------------------------------------------------------------------------------

    def _spill(self) -> None:
        if not self._spilling and self.queue.memory_bytes > self._config.queue.bytes:
            self._spilling = True
            self.spawn(self._spill_all())

    async def _spill_all(self) -> None:
        try:
            while (job := self.queue.plan_spill()) is not None:
                await self.compute.run(job.write, cost=0.0)
                self.queue.finish_spill(job)
                self.core.tables.tally.count("spilled_bytes", by=job.nbytes)
        finally:
            self._spilling = False

    # --- learner --------------------------------------------------------------------------------------------------------

    async def _take_batch(self, body: bytes) -> bytes:
        try:
            request = wire.decode(body, learner_port.TakeBatch)
            plans = self.delivery.plans
            if request.step < self.core.progress.committed:
                raise CallRefused(f"the batch of step {request.step} is committed and gone")
            await self._until(lambda: request.step in plans or bool(self.stopped), request.wait)
            if self.stopped or request.step not in plans:
                return wire.encode(learner_port.BatchReply(None, self.stopped, opened=self.core.progress.steps > 0))
            await self.commit("take_batch", [e.BatchTaken(request.step)])
            return await self.delivery.encoded(request.step)
        except Exception as error:
            self._on_error(learner_port.TAKE_BATCH.name, error)
            return wire.encode(Failure("internal", type(error).__name__, str(error)))

    async def _trained(self, report: learner_port.TrainedReport) -> learner_port.TrainedReply:
        news = report.step == self.core.progress.trained
        now = loop_now()
        with self.clock.in_state("dispatch"):
            after = self.take(e.BatchTrained(report.step), now)[1]
            if news:
                self._cut = (report.step, self.cut()) if report.cut else None
                data = {"step": report.step, "stats": report.stats, "ages": report.ages, "scheduler": self.report.brief()}
                after += [lambda: self.events.add("step", data), self.wake]
        await self.settle("trained", now, after)
        if not report.cut:
            return learner_port.TrainedReply(None)
        if self._cut is None or self._cut[0] != report.step:
            raise CallRefused(f"the cut at step {report.step} is gone: {self.core.progress.trained} steps are trained")
        return learner_port.TrainedReply(self._cut[1])

    def cut(self) -> bytes:
        """What a checkpoint must hold of the scheduler, as of now; meant to be taken with a trained acknowledgement."""
        return wire.encode(ShellCut(self.core.cut(), self._stream.state()))

    async def _publish(self, publish: learner_port.Publish) -> learner_port.PublishReply:
        self._ledger.reserve(self.core.tables.versions.next_id + 1)
        await self.commit("publish", [e.WeightsReady(publish.step, publish.address)])
        return learner_port.PublishReply(self.core.tables.versions.newest)

    async def _committed(self, report: learner_port.Committed) -> Done:
        await self.commit("committed", [e.BatchesCommitted(report.step)])
        return Done()

    async def _transfer_result(self, result: transfer_port.TransferResult) -> Done:
        await self.commit("transfer_result", [result])
        return Done()

    async def send_failed(self, transfer: int, reason: str) -> None:
        """The learner could not be asked to send."""
        event = e.SendFailed(transfer, reason)
        await self.commit("send_failed", [event], msgspec.msgpack.encode(event))

    # --- driver ---------------------------------------------------------------------------------------------------------

    async def _open_training(self, request: driver_port.OpenTraining) -> Done:
        await self.commit("open_training", [e.TrainingOpened(request.steps)])
        return Done()

    async def _start_eval(self, request: driver_port.StartEval) -> Done:
        await self.commit("start_eval", [e.EvalStarted(request.name, request.tasks, request.temperature)])
        return Done()

    async def _eval_state(self, request: driver_port.EvalState) -> driver_port.EvalStateReply:
        run = self.core.eval_run(request.name)
        if run is None:
            raise CallRefused(f"there is no evaluation {request.name!r}")
        counts = (run.n, run.finished, run.failed, run.success, run.rewards, run.done)
        return driver_port.EvalStateReply(*counts, run.example, run.users, run.raised)

    async def _watch_events(self, request: driver_port.WatchEvents) -> driver_port.EventsReply:
        await self._until(lambda: bool(self.events.after(request.after)), request.wait)
        return driver_port.EventsReply(self.events.after(request.after))

    async def _get_status(self, request: driver_port.GetStatus) -> driver_port.Status:
        self.report.export()
        nodes = self.exchanges.counts()
        return driver_port.Status({**self.report.status(), "node_counts": nodes, "states": self.clock.seconds()})

    async def _stop_run(self, request: driver_port.StopRun) -> Done:
        await self.commit("stop_run", [e.StopRequested(request.reason)])
        self.release(request.reason or "the run is stopped")
        return Done()
