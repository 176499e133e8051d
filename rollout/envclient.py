"""A node's side of its conversation with the env pools.

consumes       creates, steps, acceptances and closes of the episode loops; replies that pools push
produces       one `EnvSubmit` per pool at a time, with everything that gathered meanwhile; a future per create and step
waits for      the acknowledgement of a submit; each call's reply, until its deadline
unblocked by   a reply, a deadline, the loss of a pool
on cancel      closing an instance cancels what waits for it; a reply that comes later is refused and counted

Replies are matched by (episode, attempt, step) and the pool that was asked. A pool judges calls by its own deadlines and says
so; the deadlines here only have to notice that it says nothing at all, so they are twice as long, plus a margin for queues and
messages.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Coroutine
from typing import Any

from segue.clock import now
from segue.config.envpool import EnvPoolConfig
from segue.episode import FailureClass
from segue.errors import WireError
from segue.metrics import Metrics
from segue.ports.envpool import (
    ENV_SUBMIT,
    RESET_STEP,
    Accepted,
    Close,
    Create,
    Created,
    EnvDeliver,
    EnvFailed,
    EnvReply,
    EnvRequest,
    EnvSubmit,
    Step,
    Stepped,
)
from segue.ports.rpc import Done, Peer, PeerError, PeerTimeout, RemoteError, ask

SUBMIT_SECONDS = 5.0
"""A submit is only put into a queue; a pool that does not acknowledge it for so long gets it again (calls are idempotent)."""
SUBMIT_ATTEMPTS = 6
"""After so many a silent pool counts as lost."""
MARGIN_SECONDS = 10.0
PATIENCE_SECONDS = 0.05
"""While requests wait for the engine, calls to a pool and its replies gather for so long after the last ones sent. A call between
two processes costs both of them about a millisecond of CPU time, and nobody waits for what comes sooner."""
RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""Waits between attempts to reach a lost pool; the last one repeats. Creates wait for its return until their own deadline."""

Key = tuple[int, int, int]
Instance = tuple[int, int]


class EnvCallFailed(Exception):
    """A create or step that brought no result. `failure` is infra, env or data; `reason` is of a closed set."""

    def __init__(self, failure: str, reason: str, detail: str) -> None:
        super().__init__(f"{failure} ({reason}): {detail}")
        self.failure = failure
        self.reason = reason
        self.detail = detail


class _Waiter:
    """One call that awaits its reply."""

    __slots__ = ("future", "pool", "timer")

    def __init__(self, pool: _Channel, future: asyncio.Future[Any], timer: asyncio.TimerHandle) -> None:
        self.pool = pool
        self.future = future
        self.timer = timer


class _Channel:
    """One pool: requests not yet sent, and the instances this node has there."""

    def __init__(self, name: str, peer: Peer) -> None:
        self.name = name
        self.peer = peer
        self.pending: list[EnvRequest] = []
        self.instances: set[Instance] = set()
        self.sending = False
        self.sent = -math.inf
        self.failures = 0


class EnvClient:
    """See the module. `spawn(name, coroutine)` starts a supervised task.

    `patience()` is for how many seconds calls and replies may gather now: 0 while the engine could use an answer at once.
    """

    def __init__(
        self,
        node: str,
        config: EnvPoolConfig,
        metrics: Metrics,
        spawn: Callable[[str, Coroutine[Any, Any, None]], object],
        patience: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._node = node
        self._config = config
        self._metrics = metrics
        self._spawn = spawn
        self._patience = patience
        self._session = 0
        self._pools: dict[str, _Channel] = {}
        self._where: dict[Instance, _Channel] = {}
        self._waiting: dict[Key, _Waiter] = {}
        self._turn = itertools.count()

    def connect(self, pool: str, peer: Peer) -> None:
        """Add a pool, or a new way to reach one that was restarted (its old instances are gone)."""
        if pool in self._pools:
            channel = self._pools[pool]
            channel.peer, channel.failures = peer, 0
            self._reroute(self._lost(channel))
        else:
            self._pools[pool] = _Channel(pool, peer)

    def begin(self, session: int) -> None:
        """A new session of the node: whatever the old one has open is closed, and its replies are refused."""
        for episode, attempt in list(self._where):
            self.close(episode, attempt)
        self._session = session

    # --- calls ------------------------------------------------------------------------------------------------------

    def create(self, request: Create) -> asyncio.Future[Created]:
        """Build an instance on the least loaded pool. The future fails with `EnvCallFailed`."""
        instance = (request.episode, request.attempt)
        assert instance not in self._where, f"{instance} has an instance"
        channel = self._choose()
        self._where[instance] = channel
        channel.instances.add(instance)
        replayed = len(request.restore.replay) if request.restore is not None else 0
        c = self._config
        seconds = 2 * (c.create_seconds + c.reset_seconds + replayed * c.step_seconds) + MARGIN_SECONDS
        return self._call(channel, request, RESET_STEP, seconds)

    def step(self, request: Step) -> asyncio.Future[Stepped]:
        """Take a turn. The future fails with `EnvCallFailed`."""
        channel = self._where.get((request.episode, request.attempt))
        if channel is None:  # its pool was lost between two turns
            future: asyncio.Future[Stepped] = asyncio.get_running_loop().create_future()
            _set(future, EnvCallFailed(FailureClass.INFRA, "pool_lost", "its env pool was lost"))
            return future
        return self._call(channel, request, request.step, 2 * self._config.step_seconds + MARGIN_SECONDS)

    def accepted(self, episode: int, attempt: int, step: int) -> None:
        """Turn `step` is in the scheduler's log. Nobody waits for the pool to hear it: it goes with the next submit."""
        channel = self._where.get((episode, attempt))
        if channel is not None:
            channel.pending.append(Accepted(episode, attempt, step))

    def close(self, episode: int, attempt: int) -> None:
        """Done with an instance, if there is one; whoever waits for it is cancelled."""
        instance = (episode, attempt)
        channel = self._where.pop(instance, None)
        if channel is None:
            return
        channel.instances.discard(instance)
        for key in [key for key in self._waiting if key[:2] == instance]:
            self._settle(key).future.cancel()
        kept = [r for r in channel.pending if (r.episode, r.attempt) != instance]
        unsent = any(isinstance(r, Create) for r in channel.pending if (r.episode, r.attempt) == instance)
        channel.pending = kept
        if not unsent:
            self._send(channel, Close(episode, attempt))

    async def deliver(self, message: EnvDeliver) -> Done:
        """Replies pushed by a pool."""
        if message.session != self._session:
            self._metrics.add("segue_messages_refused_total", len(message.replies), reason="stale_session")
            return Done()
        for reply in message.replies:
            self._reply(message.pool, reply)
        return Done()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _choose(self) -> _Channel:
        """Least loaded first among the pools that answer; ties rotate."""
        assert self._pools, "no env pool is connected"
        channels = list(self._pools.values())
        first = next(self._turn) % len(channels)
        rotated = channels[first:] + channels[:first]
        return min(rotated, key=lambda c: (c.failures > 0, len(c.instances)))

    def _call(self, channel: _Channel, request: Create | Step, step: int, seconds: float) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        key = (request.episode, request.attempt, step)
        assert key not in self._waiting, f"{key} is already awaited"
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting[key] = _Waiter(channel, future, loop.call_later(seconds, self._expire, key, seconds))
        self._send(channel, request)
        return future

    def _settle(self, key: Key) -> _Waiter:
        waiter = self._waiting.pop(key)
        waiter.timer.cancel()
        return waiter

    def _expire(self, key: Key, seconds: float) -> None:
        waiter = self._settle(key)
        self._metrics.add("segue_rpc_failures_total", reason="timeout")
        what = "create" if key[2] == RESET_STEP else f"step {key[2]}"
        self._fail(waiter, "pool_silent", f"env pool {waiter.pool.name} did not answer {what} for {seconds:g} s")

    def _fail(self, waiter: _Waiter, reason: str, detail: str) -> None:
        if not waiter.future.done():
            _set(waiter.future, EnvCallFailed(FailureClass.INFRA, reason, detail))

    def _reply(self, pool: str, reply: EnvReply) -> None:
        step = RESET_STEP if isinstance(reply, Created) else reply.step
        key = (reply.episode, reply.attempt, step)
        waiter = self._waiting.get(key)
        if waiter is None or waiter.pool.name != pool:  # a pool that was given up, and is only slow, has no say any more
            self._metrics.add("segue_messages_refused_total", reason="unexpected")
            return
        self._settle(key)
        if waiter.future.done():
            return
        if isinstance(reply, EnvFailed):
            _set(waiter.future, EnvCallFailed(reply.failure, reply.reason, reply.detail))
        else:
            waiter.future.set_result(reply)

    def _send(self, channel: _Channel, request: EnvRequest) -> None:
        channel.pending.append(request)
        if not channel.sending:
            channel.sending = True
            self._spawn(f"env-submit-{channel.name}", self._flush(channel))

    async def _flush(self, channel: _Channel) -> None:
        """Send what is pending, one submit at a time and no sooner than `patience` allows, until nothing is."""
        try:
            while channel.pending:
                if channel.failures:
                    await asyncio.sleep(RETRY_SECONDS[min(channel.failures, len(RETRY_SECONDS)) - 1])
                patience = self._patience()
                if (wait := channel.sent + patience - now()) > 0.0:
                    await asyncio.sleep(wait)
                if channel.pending:  # what was dropped meanwhile is asked of nobody
                    requests, channel.pending = channel.pending, []
                    channel.sent = now()
                    await self._submit(channel, EnvSubmit(self._node, self._session, requests, patience))
        finally:
            channel.sending = False

    async def _submit(self, channel: _Channel, submit: EnvSubmit) -> None:
        """Hand over a submit; one that is not acknowledged in time is sent again unchanged."""
        for _ in range(SUBMIT_ATTEMPTS):
            try:
                await ask(channel.peer, ENV_SUBMIT, submit, SUBMIT_SECONDS)
            except PeerTimeout:
                self._metrics.add("segue_rpc_failures_total", reason="timeout")
                continue
            except PeerError:
                self._metrics.add("segue_rpc_failures_total", reason="lost")
                break
            except (RemoteError, WireError) as error:
                self._metrics.add("segue_rpc_failures_total", reason="error")
                self._refused(submit, f"env pool {channel.name} refused a call: {error}")
            channel.failures = 0
            return
        channel.failures += 1
        self._reroute(self._lost(channel, submit.requests))

    def _reroute(self, creates: list[Create]) -> None:
        """Creates of a lost pool go to another pool, or wait for this one to come back; their deadlines stay."""
        for request in creates:
            instance = (request.episode, request.attempt)
            channel = self._choose()
            self._where[instance] = channel
            channel.instances.add(instance)
            self._waiting[(*instance, RESET_STEP)].pool = channel
            self._send(channel, request)

    def _lost(self, channel: _Channel, sent: list[EnvRequest] | None = None) -> list[Create]:
        """Forget a pool's instances; returns the creates that are still wanted. Steps fail at once."""
        requests = [*(sent or []), *channel.pending]
        channel.pending = []
        creates = {(r.episode, r.attempt): r for r in requests if isinstance(r, Create)}
        wanted: list[Create] = []
        for instance in list(channel.instances):
            keys = [key for key in self._waiting if key[:2] == instance]
            channel.instances.discard(instance)
            self._where.pop(instance, None)
            if instance in creates and (*instance, RESET_STEP) in keys:
                wanted.append(creates[instance])
                continue
            for key in keys:
                self._fail(self._settle(key), "pool_lost", f"env pool {channel.name} was lost")
        return wanted

    def _refused(self, submit: EnvSubmit, detail: str) -> None:
        for request in submit.requests:
            if isinstance(request, (Create, Step)):
                step = request.step if isinstance(request, Step) else RESET_STEP
                key = (request.episode, request.attempt, step)
                if key in self._waiting:
                    self._fail(self._settle(key), "pool_refused", detail)


def _set(future: asyncio.Future[Any], error: EnvCallFailed) -> None:
    """Fail a call, and look at the failure: an episode that was dropped no longer does, which is no error worth a message."""
    future.set_exception(error)
    future.exception()
