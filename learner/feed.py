"""The learner rank's side of taking batches: asks ahead, prepares them in the pipeline, and bounds every wait for one.

consumes       `TAKE_BATCH` replies
produces       prepared batches, in order
waits for      the scheduler (each question), the next batch (at most `learner.batch_wait_seconds` while the learner has nothing
               to train, counted from when training was opened: the evaluation before it has a deadline of its own)
unblocked by   a batch, the word that there will be none, `stop`, or the deadline, which ends the run with the producers' state
on cancel      nothing is lost: the scheduler keeps batches until they are committed
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

from learner.batches import BatchRefused, PreparedBatch
from learner.pipeline import BatchPipeline
from segue.clock import Compute, now
from segue.config import Config
from segue.errors import RunFailed, WireError
from segue.metrics import Metrics
from segue.ports.driver import GET_STATUS, GetStatus
from segue.ports.learner import TAKE_BATCH, TakeBatch
from segue.ports.rpc import Peer, PeerError, PeerLost, PeerTimeout, RemoteError, ask

LONG_POLL_SECONDS = 10.0
"""How long one question for a batch waits at the scheduler before it is asked again."""
GRACE_SECONDS = 10.0
"""How much later than that its answer may come."""


class BatchFeed:
    """Batches `first`, `first + 1`, … below `steps`, each prepared for this rank. Start it with `start` on the running loop."""

    def __init__(
        self, config: Config, rank: int, world: int, scheduler: Peer, compute: Compute, metrics: Metrics, prefetch: bool
    ) -> None:
        self._config = config
        self._rank = rank
        self._scheduler = scheduler
        self._compute = compute
        self._metrics = metrics
        pin = config.learner.gpus > 0 and prefetch
        self._pipeline = BatchPipeline(config, rank, world, prefetch, pin)
        self._arrived: asyncio.Queue[int | str | Exception] = asyncio.Queue()
        self._stopped = asyncio.Event()
        self._closed_until = float("-inf")  # as far as is known, training is not opened before
        self._closed = False
        self._waiting = 0
        self._task: asyncio.Task[None] | None = None

    def start(self, first: int) -> None:
        """Begin to ask for batches."""
        self._closed_until = now() + LONG_POLL_SECONDS  # before the first answer nothing is known
        self._task = asyncio.get_running_loop().create_task(self._ask_for_all(first), name="learner batch feed")

    def stop(self) -> None:
        """From now on `wait` answers False at once."""
        self._stopped.set()

    def fail(self, error: Exception) -> None:
        """End the next wait with `error`: something else of the learner broke."""
        self._arrived.put_nowait(error)

    async def close(self) -> None:
        """Ask no more, and let the pipeline's thread end."""
        self._closed = True
        self._pipeline.close()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def wait(self, step: int) -> bool:
        """True once the batch of `step` is here, False if there will be none. Raises `RunFailed` at the deadline or on errors."""
        get = asyncio.ensure_future(self._arrived.get())
        stopped = asyncio.ensure_future(self._stopped.wait())
        limit, began = self._config.learner.batch_wait_seconds, now()
        try:
            while not (get.done() or stopped.done()) and (left := max(began, self._closed_until) + limit - now()) > 0.0:
                await asyncio.wait({get, stopped}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.is_set():
                return False
            if not get.done():
                raise RunFailed(
                    "scheduler",
                    f"The learner waited {limit:g} s for the batch of step {step} and none came; {await self._producers()}.",
                )
            found = get.result()
            if isinstance(found, Exception):
                raise found
            if isinstance(found, str):
                return False
            assert found == step, f"batch {found} came when {step} was due"
            return True
        finally:
            for future in (get, stopped):
                future.cancel()

    async def take(self) -> PreparedBatch:
        """The batch that `wait` announced. Raises `RunFailed` when it must not be trained."""
        try:
            batch: PreparedBatch = await self._compute.run(self._pipeline.take, 0.0)
        except BatchRefused as error:
            raise RunFailed(f"learner-{self._rank}", f"A batch was refused: {error}.") from error
        self._count(-1)
        return batch

    def _count(self, change: int) -> None:
        self._waiting += change
        self._metrics.set("segue_queue_depth", self._waiting, queue="prefetch")

    async def _ask_for_all(self, first: int) -> None:
        try:
            for step in range(first, self._config.steps):
                if not await self._ask_until_there(step):
                    return
        except RunFailed as error:
            self._arrived.put_nowait(error)

    async def _ask_until_there(self, step: int) -> bool:
        request = TakeBatch(step, self._rank, LONG_POLL_SECONDS)
        while not self._closed:  # a cancellation that meets a call just answered is swallowed by `wait_for` (Python 3.11)
            try:
                reply = await ask(self._scheduler, TAKE_BATCH, request, LONG_POLL_SECONDS + GRACE_SECONDS)
            except PeerTimeout:
                self._metrics.add("segue_rpc_failures_total", reason="timeout")
                continue  # asking again changes nothing there; `wait` has the deadline
            except (PeerLost, RemoteError, WireError) as error:
                raise scheduler_failed(self._metrics, "take_batch", error) from error
            if reply.batch is not None:
                self._pipeline.put(reply.batch)
                self._count(1)
                self._arrived.put_nowait(step)
                return True
            if reply.stop:
                self._arrived.put_nowait(reply.stop)
                return False
            self._closed_until = float("-inf") if reply.opened else now() + LONG_POLL_SECONDS
        return False

    async def _producers(self) -> str:
        """What the scheduler says about those who make batches."""
        try:
            status = await ask(self._scheduler, GET_STATUS, GetStatus(), GRACE_SECONDS)
        except (PeerError, RemoteError, WireError) as error:
            return f"the scheduler does not answer either ({error})"
        return f"the scheduler {produced(status.data)}"


def scheduler_failed(metrics: Metrics, call: str, error: Exception) -> RunFailed:
    """The failure of a call that the run cannot go on without; counted."""
    if isinstance(error, PeerLost):
        metrics.add("segue_rpc_failures_total", reason="lost")
        return RunFailed("scheduler", f"The scheduler is gone: {error}.")
    if isinstance(error, PeerTimeout):
        return RunFailed("scheduler", f"The scheduler did not answer {call}: {error}.")
    metrics.add("segue_rpc_failures_total", reason="error")
    return RunFailed("scheduler", f"The scheduler refused {call}: {error}.")


def produced(data: Mapping[str, Any]) -> str:
    """Why there is no batch, as far as the scheduler's status shows it; what it counts where nothing was dropped."""
    counts = data.get("counts", {})
    dropped, finished = counts.get("groups_dropped"), counts.get("finished", {})
    if not dropped:
        return f"reports {told(dict(data))}"
    return (
        f"dropped {sum(dropped.values())} groups ({_listed(dropped)}) of {sum(finished.values())} finished episodes "
        f"({_listed(finished)}): group.min_valid and learner.mask_outcomes say which are trained"
    )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items())) or "none"


def told(data: dict[str, Any], limit: int = 600) -> str:
    """A status as one line of text: what is zero or empty is left out, what is too long is cut."""
    text = json.dumps(_without_nothing(data), sort_keys=True, default=str)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: kept for key, item in value.items() if (kept := _without_nothing(item)) not in (0, "", None, {}, [])}
    return value
