"""A scheduler without a policy: it keeps logs, refuses what is old or has gaps, repeats replies, and pushes orders until seen."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from segue import wire
from segue.clock import now
from segue.episode import DeltaBody, EpisodeSnapshot, Task, log_checksum
from segue.ports.rollout import (
    EXCHANGE,
    ORDERS,
    Delta,
    Discarded,
    Exchange,
    ExchangeReply,
    Fail,
    Finish,
    Lease,
    Loaded,
    LoadFailed,
    NodeEvent,
    Order,
    Orders,
    Parked,
    Sampling,
)
from segue.ports.rpc import Peer, PeerTimeout, Service, ask
from segue.trajectory import TokenLog, concat


class Record:
    """What the scheduler knows about one episode."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.attempt = lease.attempt
        self.deltas: list[bytes] = []
        self.seconds = 0.0
        self.finish: Finish | None = None
        self.fails: list[Fail] = []
        self.parked = self.discarded = 0
        self.leased = True
        self.changed = asyncio.Event()

    @property
    def finished(self) -> bool:
        return self.finish is not None

    def log(self) -> TokenLog:
        return concat([body.log for body in self.bodies()])

    def bodies(self) -> list[DeltaBody]:
        return [wire.decode(payload, DeltaBody) for payload in self.deltas]

    def snapshot(self) -> EpisodeSnapshot:
        return EpisodeSnapshot(next_seq=len(self.deltas), deltas=list(self.deltas), seconds=self.seconds)


class FakeScheduler:
    """Takes exchanges, keeps logs, refuses what is old or has gaps, pushes orders until they are seen."""

    def __init__(self, *, lease_seconds: float = 15.0, flush_after: float = 0.1) -> None:
        self.lease_seconds, self.flush_after = lease_seconds, flush_after
        self.service = Service()
        self.service.add(EXCHANGE, self._exchange)
        self.nodes: dict[str, Peer] = {}
        self.sessions: dict[str, int] = {}
        self.fenced: set[tuple[str, int]] = set()
        self.episodes: dict[int, Record] = {}
        self.events: list[NodeEvent] = []
        self.exchanges: list[Exchange] = []
        self.received: list[tuple[float, Exchange]] = []
        self.joined = asyncio.Event()
        self.loads: list[Loaded | LoadFailed] = []
        self.loaded = asyncio.Event()
        self.forget_deltas: Callable[[Delta], bool] = lambda delta: False
        self._numbers: dict[tuple[str, int], int] = defaultdict(int)
        self._replies: dict[tuple[str, int, int], ExchangeReply] = {}
        self.refused = 0

    async def until_joined(self, node: str, session: int = 1) -> None:
        while self.sessions.get(node, 0) < session:
            self.joined.clear()
            await self.joined.wait()

    # --- orders down ----

    async def push(self, node: str, *orders: Order) -> None:
        session = self.sessions[node]
        first = self._numbers[(node, session)]
        self._numbers[(node, session)] += len(orders)
        while True:
            try:
                seen = await ask(self.nodes[node], ORDERS, Orders(node, session, first, list(orders)), 1.0)
            except PeerTimeout:
                continue
            if seen.session != session or seen.upto >= first + len(orders):
                return

    def lease(
        self, episode: int, *, task: Task | None = None, group: int = 0, slice_tokens: int = 0, seed: int | None = None
    ) -> Lease:
        """The next attempt of an episode."""
        record = self.episodes.get(episode)
        lease = Lease(
            episode=episode,
            attempt=1 if record is None else record.attempt + 1,
            group=group,
            member=episode,
            purpose="train",
            priority=group,
            task=task or (record.lease.task if record is not None else Task(f"task-{episode}", "talk", episode)),
            sampling=Sampling(1.0, episode if seed is None else seed) if record is None else record.lease.sampling,
            snapshot=EpisodeSnapshot() if record is None else record.snapshot(),
            slice_tokens=slice_tokens,
        )
        if record is None:
            self.episodes[episode] = Record(lease)
        else:
            record.lease, record.attempt, record.leased = lease, lease.attempt, True
        return lease

    async def until(self, episode: int, condition: Callable[[Record], bool]) -> Record:
        record = self.episodes[episode]
        while not condition(record):
            record.changed.clear()
            await record.changed.wait()
        return record

    async def finished(self, episode: int) -> Record:
        return await self.until(episode, lambda record: record.finish is not None)

    async def load(self) -> Loaded | LoadFailed:
        while not self.loads:
            self.loaded.clear()
            await self.loaded.wait()
        return self.loads.pop(0)

    def fence(self, node: str) -> None:
        """The scheduler ends a session: its attempts are lost."""
        self.fenced.add((node, self.sessions[node]))

    # --- exchanges up ----

    async def _exchange(self, exchange: Exchange) -> ExchangeReply:
        self.received.append((now(), exchange))
        key = (exchange.node, exchange.session)
        if exchange.info is not None and exchange.session > self.sessions.get(exchange.node, 0):
            self.sessions[exchange.node] = exchange.session
            self.joined.set()
        if key in self.fenced or exchange.session != self.sessions.get(exchange.node):
            return ExchangeReply(exchange.number, [], [], self.flush_after, self.lease_seconds, fenced=True)
        known = self._replies.get((*key, exchange.number))
        if known is not None:
            return known
        assert exchange.number == 1 or (*key, exchange.number - 1) in self._replies, "exchanges come in order"
        self.exchanges.append(exchange)
        refused: set[tuple[int, int]] = set()
        resend: dict[tuple[int, int], int] = {}
        for event in exchange.events:
            self.events.append(event)
            self._take(event, refused, resend)
        gaps = [(episode, attempt, seq) for (episode, attempt), seq in resend.items()]
        reply = ExchangeReply(exchange.number, sorted(refused), gaps, self.flush_after, self.lease_seconds)
        self._replies[(*key, exchange.number)] = reply
        for record in self.episodes.values():
            record.changed.set()
        return reply

    def _take(self, event: NodeEvent, refused: set[tuple[int, int]], resend: dict[tuple[int, int], int]) -> None:
        if isinstance(event, (Loaded, LoadFailed)):
            self.loads.append(event)
            self.loaded.set()
            return
        episode, attempt = (
            (event.head.episode, event.head.attempt) if isinstance(event, Delta) else (event.episode, event.attempt)
        )
        record = self.episodes[episode]
        if attempt != record.attempt or not record.leased:
            refused.add((episode, attempt))
            self.refused += 1
            return
        if (episode, attempt) in resend:
            return
        match event:
            case Delta(head=head, payload=payload):
                if self.forget_deltas(event):
                    return
                if head.seq > len(record.deltas):
                    resend[(episode, attempt)] = len(record.deltas)
                elif head.seq == len(record.deltas):
                    record.deltas.append(payload)
            case Finish() | Parked():
                if event.next_seq > len(record.deltas):
                    resend[(episode, attempt)] = len(record.deltas)
                    return
                record.leased, record.seconds = False, event.seconds
                if isinstance(event, Finish):
                    assert event.checksum == log_checksum(record.deltas)
                    record.finish = event
                else:
                    record.parked += 1
            case Fail():
                record.leased = False
                record.fails.append(event)
            case Discarded():
                record.leased = False
                record.discarded += 1
            case _:
                pass
