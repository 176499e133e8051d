"""The scheduler's end of the channel to one rollout node: sessions, numbered exchanges, numbered orders.

Orders wait here until the node has seen them. One batch is in flight; it is sent again, after a pause, until it is seen or
the session is over. Batches keep a distance, in which orders gather, so that their number does not grow with that of the
episodes; the first after a silence goes at once. Nothing runs while nothing waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from segue.clock import now
from segue.ports.rollout import ORDERS, ExchangeReply, Lease, Order, Orders
from segue.ports.rpc import Peer, PeerError, PeerTimeout, RemoteError, ask

log = logging.getLogger(__name__)

BATCH_ORDERS = 1024
BATCH_BYTES = 4 << 20
"""A batch of orders ends at either: leases carry whole logs, and a message should stay far below what a transport refuses. What
is left goes at once."""
AGAIN_SECONDS = 0.5
"""Pause before a batch that was not seen is sent again."""


class Later(Protocol):
    """An order that must be fetched from somewhere slow before it can be sent."""

    async def fetch(self) -> Order: ...


class NodeLink:
    """One node. `session` 0: it has never joined. `over`: that session was ended, and a new one has yet to begin."""

    def __init__(
        self,
        name: str,
        timeout: float,
        order_after: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        count: Callable[..., None],
    ) -> None:
        self.name = name
        self.peer: Peer | None = None
        self.session = 0
        self.over = True
        self.number = -1
        self.reply: ExchangeReply | None = None
        self.replied_at = float("-inf")
        self.counts: dict[str, float] = {}
        self.lock = asyncio.Lock()
        self._timeout = timeout
        self._order_after = order_after
        self._pushed_at = float("-inf")
        self._full = False
        self._spawn = spawn
        self._count = count
        self._orders: deque[Order | Later] = deque()
        self._first = 0
        self._pusher: asyncio.Task[None] | None = None

    def begin(self, session: int) -> None:
        """A new session: orders of the old one are void."""
        self.session = session
        self.over = False
        self.number = -1
        self.reply = None
        self._orders.clear()
        self._first = 0

    def end(self, session: int) -> None:
        """The session is over."""
        if session == self.session:
            self.over = True
            self._orders.clear()

    def order(self, session: int, order: Order | Later) -> None:
        """Send an order, if its session still lives; those after it wait until it is fetched."""
        if session != self.session or self.over:
            return
        self._orders.append(order)
        self.push()

    def push(self) -> None:
        """Make sure that what waits is on its way."""
        if self._orders and self.peer is not None and (self._pusher is None or self._pusher.done()):
            self._pusher = self._spawn(self._push())

    def seen(self, session: int, upto: int) -> bool:
        """All orders below `upto` have arrived. True if that was news."""
        if session != self.session or self.over or upto <= self._first:
            return False
        for _ in range(min(upto - self._first, len(self._orders))):
            self._orders.popleft()
            self._first += 1
        return True

    @property
    def waiting(self) -> int:
        """Orders not seen yet."""
        return len(self._orders)

    async def _push(self) -> None:
        while self._orders and self.peer is not None:
            pause = 0.0 if self._full else self._pushed_at + self._order_after() - now()
            if pause > 0:
                await asyncio.sleep(pause)
                continue
            session, batch = self.session, await self._batch()
            if not batch:
                continue  # what waited is void meanwhile
            self._pushed_at = now()
            message = Orders(self.name, session, self._first, batch)
            try:
                answer = await ask(self.peer, ORDERS, message, self._timeout)
            except (PeerError, RemoteError) as error:
                reason = "timeout" if isinstance(error, PeerTimeout) else "lost" if isinstance(error, PeerError) else "error"
                self._count("rpc_failures", reason)
                log.warning("%s has not taken %d orders (%s); they are sent again", self.name, len(batch), error)
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            if answer.session != session:
                # Born again, or not yet: its next exchange says which, and begins anew if it must.
                await asyncio.sleep(AGAIN_SECONDS)
            elif not self.seen(session, answer.upto) and session == self.session and not self.over:
                await asyncio.sleep(AGAIN_SECONDS)

    async def _batch(self) -> list[Order]:
        """What goes next; nothing if the session ended on the way."""
        batch: list[Order] = []
        nbytes = 0
        here = self.session, self._first
        self._full = False
        while len(batch) < len(self._orders):
            order = self._orders[len(batch)]
            if not isinstance(order, Order):
                order = await order.fetch()
                if (self.session, self._first) != here or self.over:
                    return []
                self._orders[len(batch)] = order
            if isinstance(order, Lease):
                nbytes += sum(map(len, order.snapshot.deltas))
            if batch and (len(batch) == BATCH_ORDERS or nbytes > BATCH_BYTES):
                self._full = True
                break
            batch.append(order)
        return batch
