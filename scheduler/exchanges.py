"""The exchanges of rollout nodes: sessions, numbers, repetitions, and every event of one exchange as one commit.

Consumes: `exchange` calls. Waits for: the node's previous exchange, the journal, and, if the node flushes faster than it was told
to, for that long. Unblocked by: time. Produces: replies; a repeated exchange gets the reply it had.

How many messages there are depends on the nodes, not on their episodes: each node has one exchange per `flush_after`, whose reply
is held back if it comes earlier, and one push of orders per `order_after`. Both grow with the nodes, so that all of them together
stay within their shares of the message rate. A call and its reply count as one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from scheduler.core import events as e
from scheduler.core.commands import Command, Refuse, Resend
from scheduler.errors import CallRefused
from scheduler.links import NodeLink
from segue.clock import now as loop_now
from segue.config import Config
from segue.ports import rollout as rollout_port
from segue.ports.rpc import Peer

if TYPE_CHECKING:
    from scheduler.shell import SchedulerShell

MIN_FLUSH_SECONDS, MIN_ORDER_SECONDS = 0.1, 0.05
"""However few nodes there are, none needs to report or to be told anything more often."""
EXCHANGE_SHARE, ORDER_SHARE = 0.4, 0.4
"""Of `scheduler.messages_per_second`; the learner's and the driver's calls have the rest."""
HOLD_SHARE = 0.1
"""Of a lease: no reply is held back longer, or the node would take it for lost."""


class Exchanges:
    """All node links by name."""

    def __init__(self, shell: SchedulerShell, config: Config) -> None:
        self._shell = shell
        self._lease_seconds = config.scheduler.lease_seconds
        self._rate = config.scheduler.messages_per_second
        self._links: dict[str, NodeLink] = {}

    def link(self, name: str) -> NodeLink:
        """The channel to a node, known or new."""
        link = self._links.get(name)
        if link is None:
            count = self._shell.core.tables.tally.count
            link = self._links[name] = NodeLink(name, self._lease_seconds / 3, self.order_after, self._shell.spawn, count)
        return link

    def connect(self, name: str, peer: Peer) -> None:
        """Orders for this node go to `peer` from now on."""
        link = self.link(name)
        link.peer = peer
        link.push()

    def counts(self) -> dict[str, dict[str, float]]:
        """What each node last said of itself."""
        return {name: link.counts for name, link in self._links.items() if link.counts}

    async def exchange(self, exchange: rollout_port.Exchange) -> rollout_port.ExchangeReply:
        """Answer one exchange."""
        link = self.link(exchange.node)
        async with link.lock:
            reply = await self._answer(link, exchange)
            pause = link.replied_at + min(reply.flush_after, HOLD_SHARE * self._lease_seconds) - loop_now()
            if pause > 0:
                await asyncio.sleep(pause)
            link.replied_at = loop_now()
            return reply

    async def _answer(self, link: NodeLink, exchange: rollout_port.Exchange) -> rollout_port.ExchangeReply:
        shell = self._shell
        tally = shell.core.tables.tally
        if exchange.session > link.session and exchange.info is not None:
            info = exchange.info
            if info.max_episodes < 1:
                raise CallRefused(f"{link.name} joins with max_episodes = {info.max_episodes}: it must be at least 1")
            link.begin(exchange.session)
            link.counts = {}
            return await self._take_in(link, exchange, e.NodeJoined(link.name, exchange.session, info.max_episodes, info.slots))
        if exchange.session != link.session or link.over:
            tally.count("refused", "stale_session")
            return self._reply(exchange, fenced=True)
        heard = e.NodeHeard(link.name, exchange.session)
        if exchange.info is not None and exchange.number < link.number:
            # The first exchange of a session that is long under way: another process that calls itself the same.
            tally.count("refused", "stale_session")
            return self._reply(exchange, fenced=True)
        if link.reply is not None and exchange.number <= link.number:
            tally.count("refused", "duplicate")
            await shell.commit("exchange", [heard])
            return msgspec.structs.replace(link.reply, number=exchange.number)
        if exchange.number != link.number + 1:
            # It has had replies that this life of the scheduler never gave: they share no state any more.
            tally.count("refused", "unexpected")
            await shell.commit("exchange", [e.NodeLost(link.name, exchange.session, "exchange number")])
            return self._reply(exchange, fenced=True)
        return await self._take_in(link, exchange, heard)

    async def _take_in(
        self, link: NodeLink, exchange: rollout_port.Exchange, heard: e.NodeJoined | e.NodeHeard
    ) -> rollout_port.ExchangeReply:
        """Every event of the exchange, in order, as one commit."""
        shell, now = self._shell, loop_now()
        refused: dict[tuple[int, int], None] = {}
        resend: dict[tuple[int, int, int], None] = {}
        with shell.clock.in_state("dispatch"):
            after = shell.take(heard, now)[1]
            for event in exchange.events:
                commands, thunks = self._take_in_one(exchange, event, now)
                after += thunks
                for command in commands:
                    if isinstance(command, Refuse):
                        refused[command.episode, command.attempt] = None
                    elif isinstance(command, Resend):
                        resend[command.episode, command.attempt, command.seq] = None
            if exchange.counts:
                link.counts = link.counts | exchange.counts
            if counts := link.counts:
                tokens, seconds = counts.get("prefill_weight_update", 0.0), counts.get("seconds_weight_update", 0.0)
                after += shell.take(e.NodeSpent(exchange.node, exchange.session, tokens, seconds), now)[1]
        link.seen(exchange.session, exchange.orders_seen)
        link.number = exchange.number
        reply = link.reply = self._reply(exchange, list(refused), list(resend), fenced=link.over)
        await shell.settle("exchange", now, after)
        return reply

    def _take_in_one(
        self, exchange: rollout_port.Exchange, event: rollout_port.NodeEvent, now: float
    ) -> tuple[Sequence[Command], list[Callable[[], None]]]:
        shell, queue = self._shell, self._shell.queue
        if isinstance(event, rollout_port.Delta):
            commands, after = shell.take(event.head, now)
            if not commands:
                queue.append(event.head.episode, event.payload)
            return commands, after
        if isinstance(event, rollout_port.Loaded | rollout_port.LoadFailed):
            return shell.take(e.FromNode(exchange.node, exchange.session, event), now)
        if isinstance(event, rollout_port.Finish):
            whole = event.next_seq == queue.count(event.episode)
            if whole and event.checksum != queue.checksum(event.episode):
                return shell.take(rollout_port.Fail(event.episode, event.attempt, "infra", "checksum"), now)
            commands, after = shell.take(event, now)
            if not any(isinstance(command, Refuse | Resend) for command in commands):
                queue.finished(event.episode)
            return commands, after
        return shell.take(event, now)

    def _reply(
        self,
        exchange: rollout_port.Exchange,
        refused: list[tuple[int, int]] | None = None,
        resend: list[tuple[int, int, int]] | None = None,
        fenced: bool = False,
    ) -> rollout_port.ExchangeReply:
        return rollout_port.ExchangeReply(
            number=exchange.number,
            refused=refused or [],
            resend=resend or [],
            flush_after=self.flush_after(),
            lease_seconds=self._lease_seconds,
            fenced=fenced,
        )

    def flush_after(self) -> float:
        """Seconds between two exchanges of one node."""
        return max(MIN_FLUSH_SECONDS, len(self._shell.core.tables.nodes) / (EXCHANGE_SHARE * self._rate))

    def order_after(self) -> float:
        """Seconds between two pushes of orders to one node."""
        return max(MIN_ORDER_SECONDS, len(self._shell.core.tables.nodes) / (ORDER_SHARE * self._rate))
