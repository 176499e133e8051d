"""What a node has to say to the scheduler: events gathered into numbered exchanges, and the time its leases last.

`Outbox` is pure: events and `now` in, exchanges and deadlines out. `ExchangeLoop` gives it a peer and a clock.

One exchange is in flight. Pending events wait at most `flush_after` seconds after the first of them (set by every reply), or go
at once when they are urgent or weigh 64 kB; but a node sends no more than one exchange per `flush_after`, since that is how the
scheduler keeps the message load of all nodes together in bounds (episodes end much more often than that on a large node). Only
what an update waits for does not wait itself. An exchange without a reply is sent again unchanged. The node's leases end
`NODE_SHARE · lease_seconds` after the (first) *sending* of its last acknowledged exchange, on the node's own clock: before the
scheduler's do, which last `lease_seconds` from their receipt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from segue.clock import now
from segue.errors import RunFailed, WireError
from segue.metrics import Metrics
from segue.ports.rollout import (
    EXCHANGE,
    Delta,
    Exchange,
    ExchangeReply,
    Fail,
    Finish,
    Loaded,
    LoadFailed,
    NodeEvent,
    NodeInfo,
    Order,
    Orders,
    Parked,
)
from segue.ports.rpc import Peer, PeerError, PeerTimeout, RemoteError, ask

NODE_SHARE = 0.8
FLUSH_BYTES = 64 << 10
EXCHANGE_BYTES = 8 << 20
"""No exchange is heavier than this (unless a single event is); what is left goes with the next one, at once."""
EVENT_BYTES = 64
"""What an event without a payload weighs, about."""

log = logging.getLogger(__name__)
Attempt = tuple[int, int]


class Acknowledged(msgspec.Struct, frozen=True):
    """What a reply settled: records now in the scheduler's log, attempts to stop, gaps that could not be filled, and the end."""

    records: list[tuple[int, int, int]]
    refused: list[Attempt]
    unfillable: list[Attempt]
    fenced: bool


_NOTHING = Acknowledged([], [], [], False)


class Outbox:
    """Events of one session. Times are seconds of one clock, handed in."""

    def __init__(self, node: str, session: int, info: NodeInfo, lease_seconds: float, now: float) -> None:
        self._node = node
        self.session = session
        self._info: NodeInfo | None = info
        self._lease_seconds = lease_seconds
        self._flush_after = 0.0
        self._number = 0
        self._pending: list[NodeEvent] = []
        self._bytes = 0
        self._urgent = False
        self._immediate = True  # the first exchange joins
        self._pending_since: float | None = None
        self._flight: Exchange | None = None
        self._flight_sent = now
        self._began = now
        self._acked_sent: float | None = None
        self._last_sent = now
        self._history: dict[Attempt, list[Delta | Finish | Parked | Fail]] = {}
        self._said: dict[str, float] = {}

    # --- events in --------------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Events that no exchange has taken yet."""
        return len(self._pending)

    @property
    def joined(self) -> bool:
        return self._acked_sent is not None

    def put(self, event: NodeEvent, now: float, urgent: bool = False) -> None:
        """Queue an event."""
        self._pending.append(event)
        self._bytes += _weight(event)
        self._urgent = self._urgent or urgent or self._bytes >= FLUSH_BYTES
        self._immediate = self._immediate or isinstance(event, (Loaded, LoadFailed))
        if self._pending_since is None:
            self._pending_since = now
        if isinstance(event, (Delta, Finish, Parked, Fail)):
            self._history.setdefault(_key(event), []).append(event)

    def discard(self, attempt: Attempt) -> int:
        """Forget what an attempt has still to say. Returns how many sampled tokens that loses."""
        lost = sum(_sampled(event) for event in self._pending if _attempt(event) == attempt)
        self._pending = [event for event in self._pending if _attempt(event) != attempt]
        self._bytes = sum(map(_weight, self._pending))
        self._history.pop(attempt, None)
        return lost

    @property
    def unacknowledged(self) -> bool:
        """Whether anything has not been heard by the scheduler, as far as is known."""
        return self._flight is not None or bool(self._pending)

    def sampled(self) -> int:
        """Sampled tokens in events that no reply has acknowledged."""
        flight = self._flight.events if self._flight is not None else []
        return sum(map(_sampled, [*flight, *self._pending]))

    # --- exchanges out ----------------------------------------------------------------------------------------------

    @property
    def timeout(self) -> float:
        """How long to wait for a reply before sending again: several attempts fit into a lease."""
        return self._lease_seconds / 5

    @property
    def lease_end(self) -> float | None:
        """When the node's leases end if nothing is acknowledged until then; None before it has joined."""
        return None if self._acked_sent is None else self._acked_sent + NODE_SHARE * self._lease_seconds

    def due(self) -> float:
        """When the next exchange is to be sent, if none is in flight."""
        renewal = self._last_sent + self._lease_seconds / 3
        if self._flight is not None or self._immediate:
            return self._began
        if self._pending_since is None:
            return renewal
        flush = self._last_sent if self._urgent else self._pending_since
        return min(renewal, flush + self._flush_after)

    def take(self, now: float, orders_seen: int, counts: dict[str, float]) -> Exchange:
        """The exchange to send now: the one in flight again, unchanged, or a new one with everything pending, and of `counts`
        with what is not as in the exchange before."""
        if self._flight is None:
            events: list[NodeEvent] = []
            weight = 0
            for event in self._pending:
                weight += _weight(event)
                if events and weight > EXCHANGE_BYTES:
                    break
                events.append(event)
            del self._pending[: len(events)]
            self._bytes = sum(map(_weight, self._pending))
            self._urgent = self._immediate = bool(self._pending)
            self._pending_since = now if self._pending else None
            self._number += 1
            news: dict[str, float] = {}
            if counts is not self._said:
                said, self._said = self._said, counts
                news = {name: value for name, value in counts.items() if said.get(name) != value}
            self._flight = Exchange(self._node, self.session, self._number, events, orders_seen, self._info, news)
            self._flight_sent = now  # a reply may be to the first sending of it
            self._last_sent = now
        return self._flight

    def replied(self, reply: ExchangeReply, now: float) -> Acknowledged | None:
        """Settle the exchange in flight. None if the reply is to another one."""
        flight = self._flight
        if flight is None or reply.number != flight.number:
            return None
        self._flight = None
        if reply.fenced:
            return Acknowledged([], [], [], True)
        self._info = None
        self._acked_sent = self._flight_sent
        self._lease_seconds = reply.lease_seconds
        self._flush_after = reply.flush_after
        if not (flight.events or reply.refused or reply.resend):  # it only renewed the leases
            return _NOTHING
        refused = set(reply.refused)
        missing = {(episode, attempt) for episode, attempt, _ in reply.resend}
        records = [
            (event.head.episode, event.head.attempt, event.head.turn)
            for event in flight.events
            if isinstance(event, Delta) and event.head.record and _key(event) not in refused | missing
        ]
        for attempt in refused:
            self.discard(attempt)
        unfillable = [(e, a) for e, a, seq in reply.resend if not self._resend((e, a), seq, now)]
        for event in flight.events:  # whoever ended and was acknowledged needs no history
            if isinstance(event, (Finish, Parked, Fail)) and _key(event) not in missing:
                self._history.pop(_key(event), None)
        return Acknowledged(records, list(reply.refused), unfillable, False)

    def _resend(self, attempt: Attempt, seq: int, now: float) -> bool:
        """Queue again, in front, everything an attempt has said from delta `seq` on. False if that delta is not here."""
        history = self._history.get(attempt, [])
        deltas = [e for e in history if isinstance(e, Delta) and e.head.seq >= seq]
        if not deltas or deltas[0].head.seq != seq:
            return False
        again: list[NodeEvent] = [*deltas, *(e for e in history if not isinstance(e, Delta))]
        self._pending = [*again, *(e for e in self._pending if not any(e is a for a in again))]
        self._bytes = sum(map(_weight, self._pending))
        self._immediate = True
        self._pending_since = now
        return True


class OrderInbox:
    """Which orders of this session have been seen: each is carried out once, in order, whatever is sent again."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.upto = 0

    def take(self, message: Orders) -> list[Order]:
        """The orders not seen before. A batch that begins behind what is due is left out whole: the gap is sent again first."""
        if message.session != self.session or message.first > self.upto:
            return []
        fresh = message.orders[self.upto - message.first :]
        self.upto += len(fresh)
        return fresh


class ExchangeLoop:
    """Sends one outbox's exchanges until its session is over.

    consumes       pending events; replies
    produces       exchanges; `settled(acknowledged)` after each reply
    waits for      the next flush or renewal; the reply, `Outbox.timeout`; a retry after the scheduler was unreachable
    unblocked by   an event that is urgent or arms the timer (`wake`), a reply, the end of the lease
    on cancel      nothing is sent any more
    """

    def __init__(
        self,
        outbox: Outbox,
        peer: Peer,
        metrics: Metrics,
        *,
        join_seconds: float,
        orders_seen: Callable[[], int],
        counts: Callable[[], dict[str, float]],
        settled: Callable[[Acknowledged], None],
    ) -> None:
        self._outbox = outbox
        self._peer = peer
        self._metrics = metrics
        self._join_deadline = now() + join_seconds
        self._join_seconds = join_seconds
        self._orders_seen = orders_seen
        self._counts = counts
        self._settled = settled
        self._seconds = metrics.histogram("segue_exchange_seconds")
        self._waiter: asyncio.Future[None] | None = None
        self._closing = False

    def wake(self) -> None:
        """Something was put into the outbox: look at its deadlines again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """The node is dying: one more attempt to say what is pending, then the session is over."""
        self._closing = True
        self.wake()

    async def run(self) -> str:
        """Exchange until the session is over; returns why. Raises `RunFailed` if the scheduler cannot be joined in time."""
        outbox = self._outbox
        while True:
            await self._until_due()
            if self._closing:
                if outbox.unacknowledged:
                    await self._exchange(outbox.timeout)
                return "closed"
            end = outbox.lease_end if outbox.lease_end is not None else self._join_deadline
            left = end - now()
            if left <= 0:
                if outbox.joined:
                    return "expired"
                raise RunFailed("scheduler", f"The scheduler did not let this node join within {self._join_seconds:g} s.")
            if await self._exchange(min(outbox.timeout, left)):
                return "fenced"

    async def _until_due(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._closing and (due := self._outbox.due()) > loop.time():
            self._waiter = loop.create_future()
            timer = loop.call_at(due, self.wake)
            try:
                await self._waiter
            finally:
                timer.cancel()

    async def _exchange(self, timeout: float) -> bool:
        """One attempt. True if the session is over."""
        outbox = self._outbox
        exchange = outbox.take(now(), self._orders_seen(), self._counts())
        began = now()
        try:
            reply = await ask(self._peer, EXCHANGE, exchange, timeout)
        except PeerTimeout:
            self._metrics.add("segue_rpc_failures_total", reason="timeout")
            return False
        except PeerError:
            self._metrics.add("segue_rpc_failures_total", reason="lost")
            await asyncio.sleep(min(timeout, outbox.timeout / 3))
            return False
        except (RemoteError, WireError) as error:
            log.warning("exchange %d: %s", exchange.number, error)
            self._metrics.add("segue_rpc_failures_total", reason="error")
            await asyncio.sleep(min(timeout, outbox.timeout / 3))
            return False
        self._seconds.observe(now() - began)
        settled = outbox.replied(reply, now())
        if settled is None:
            self._metrics.add("segue_messages_refused_total", reason="unexpected")
            return False
        self._settled(settled)
        return settled.fenced


def _key(event: Delta | Finish | Parked | Fail) -> Attempt:
    return (event.head.episode, event.head.attempt) if isinstance(event, Delta) else (event.episode, event.attempt)


def _attempt(event: NodeEvent) -> Attempt | None:
    """Whose event it is; None for the node's own."""
    if isinstance(event, Delta):
        return event.head.episode, event.head.attempt
    return None if isinstance(event, (Loaded, LoadFailed)) else (event.episode, event.attempt)


def _weight(event: NodeEvent) -> int:
    return EVENT_BYTES + len(event.payload) if isinstance(event, Delta) else EVENT_BYTES


def _sampled(event: NodeEvent) -> int:
    return sum(n for _, n in event.head.sampled) if isinstance(event, Delta) else 0
