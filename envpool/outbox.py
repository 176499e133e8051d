"""Replies on their way to one session of a node: gathered into batches, one batch in flight, sent again until acknowledged.

consumes       replies of the pool's core
produces       `EnvDeliver` calls to the node, which recognises repetitions by (episode, attempt, step)
waits for      the acknowledgement of a batch, up to `DELIVER_SECONDS`, then the same batch again
               the node's patience, counted from the last batch sent
unblocked by   the acknowledgement; giving up after `silence_seconds` without one (the node counts as lost); `close`
on cancel      the batch in flight and what is pending are dropped
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable

from segue.clock import now
from segue.errors import WireError
from segue.metrics import Metrics
from segue.ports.envpool import ENV_DELIVER, Created, EnvDeliver, EnvReply, Stepped
from segue.ports.rpc import Peer, PeerError, PeerTimeout, RemoteError, ask

log = logging.getLogger(__name__)

DELIVER_SECONDS = 5.0
RETRY_SECONDS = 1.0
BATCH_REPLIES = 512
BATCH_BYTES = 1 << 20


class Outbox:
    """See the module. `silent` is called when the node is given up, `failed` with an error of our own."""

    def __init__(
        self,
        pool: str,
        peer: Peer,
        session: int,
        metrics: Metrics,
        silence_seconds: float,
        silent: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.peer = peer
        self.session = session
        self.patience = 0.0
        """For how many seconds after a batch the node lets the next one gather."""
        self._sent = -math.inf
        self._pool = pool
        self._metrics = metrics
        self._silence_seconds = silence_seconds
        self._silent = silent
        self._failed = failed
        self._pending: deque[EnvReply] = deque()
        self._task: asyncio.Task[None] | None = None

    def put(self, reply: EnvReply) -> None:
        """Send `reply`, with whatever else gathers until it can go."""
        self._pending.append(reply)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """Drop everything."""
        self._pending.clear()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await asyncio.sleep(0)  # what this turn of the loop brings goes together
            while self._pending:
                if (wait := self._sent + self.patience - now()) > 0.0:
                    await asyncio.sleep(wait)
                self._sent = now()
                await self._hand_over(EnvDeliver(self._pool, self.session, self._batch()))
        except Exception as error:
            self._failed(error)
        finally:
            self._task = None

    def _batch(self) -> list[EnvReply]:
        batch: list[EnvReply] = []
        size = 0
        while self._pending and len(batch) < BATCH_REPLIES and size < BATCH_BYTES:
            reply = self._pending.popleft()
            if isinstance(reply, (Created, Stepped)):
                size += len(reply.snapshot or b"")
            batch.append(reply)
        return batch

    async def _hand_over(self, deliver: EnvDeliver) -> None:
        first = now()
        while True:
            try:
                await ask(self.peer, ENV_DELIVER, deliver, DELIVER_SECONDS)
                return
            except PeerTimeout:
                self._metrics.add("segue_rpc_failures_total", reason="timeout")
            except PeerError:
                self._metrics.add("segue_rpc_failures_total", reason="lost")
                await asyncio.sleep(RETRY_SECONDS)
            except (RemoteError, WireError) as error:
                self._metrics.add("segue_rpc_failures_total", reason="error")
                log.error("%s refused %d replies: %s", self.peer.name, len(deliver.replies), error)
                return
            if now() - first >= self._silence_seconds:
                log.warning("%s took no replies for %g s: its environments are closed", self.peer.name, self._silence_seconds)
                self._pending.clear()
                self._silent()
                return
