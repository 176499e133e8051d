"""The torchdata pipeline that turns batch messages into prepared batches while the learner trains the one before."""

from __future__ import annotations

import queue
from typing import Any

from torchdata.nodes import BaseNode, Mapper, PinMemory, Prefetcher

from learner.batches import BatchRefused, PreparedBatch, assemble, decode_batch, judge
from segue.config import Config
from segue.ports.learner import Batch


class BatchSource(BaseNode[Batch]):
    """The pipeline's end towards the scheduler: hands on what `put` was given, waits where nothing is, ends after `close`."""

    def __init__(self) -> None:
        super().__init__()
        self._items: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._step = -1

    def put(self, batch: Batch) -> None:
        self._items.put(batch)

    def close(self) -> None:
        self._items.put(None)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)

    def next(self) -> Batch:
        batch = self._items.get()
        if batch is None:
            self._items.put(None)
            raise StopIteration
        self._step = batch.step
        return batch

    def get_state(self) -> dict[str, Any]:
        """The step handed on last. Nothing is restored from it: the scheduler hands out batches by step."""
        return {"step": self._step}


class BatchPipeline:
    """Decode → judge → pack → pin, `prefetch`ing in a thread of its own, or inline (serial mode).

    `put` never blocks and keeps the order; `take` blocks until the next batch is prepared: call it where blocking is allowed,
    after a `put`. Raises `BatchRefused` for a batch that must not be trained.
    """

    def __init__(self, config: Config, rank: int = 0, world: int = 1, prefetch: bool = True, pin: bool = False) -> None:
        self._source = BatchSource()
        decoded = Mapper(self._source, _guarded(lambda batch: (batch, decode_batch(batch))))
        judged = Mapper(decoded, _guarded(lambda x: (x[0], *judge(x[1], x[0].step, x[0].version_steps, config))))
        node: BaseNode[Any] = Mapper(
            judged,
            _guarded(lambda x: assemble(x[0].step, x[1], x[2], dict(x[0].version_steps), config, rank, world)),
        )
        if pin:
            node = PinMemory(node, "cuda")
        if prefetch:
            # Two, although at most one batch waits here: its thread then rests in the source instead of asking for room.
            node = Prefetcher(node, prefetch_factor=2)
        self._node = node

    def put(self, batch: Batch) -> None:
        self._source.put(batch)

    def take(self) -> PreparedBatch:
        result = next(self._node)
        if isinstance(result, BatchRefused):
            raise result
        assert isinstance(result, PreparedBatch)
        return result

    def close(self) -> None:
        """Let the thread end."""
        self._source.close()


def _guarded(stage: Any) -> Any:
    """A refusal travels down the pipeline as a value: torchdata would bury its sentence under a traceback of its thread."""

    def run(item: Any) -> Any:
        if isinstance(item, BatchRefused):
            return item
        try:
            return stage(item)
        except BatchRefused as error:
            return error

    return run
