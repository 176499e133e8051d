"""The pool's core: which attempts it serves, what it has answered, and what it refuses. Pure: no I/O, no threads, no clock.

Consumes: requests of nodes, replies and deaths of workers, the time. Produces: commands (`envpool.commands`).

One attempt per episode is served, the newest. Requests of older ones are refused and counted. A repeated request gets the stored
reply, so that no step ever runs twice; replies are kept until the node says that their record was accepted. How an attempt ended
is remembered, so that a request still on its way finds out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from envpool.commands import CLASS_OF, GROUP_OF, Command, Deliver, Fault, Reason
from envpool.instances import Instances
from envpool.messages import LoadedSuite, LoadFailed, Reply
from envpool.record import Instance, Phase, PoolLimits
from segue.metrics import Metrics, SlotClock
from segue.ports.envpool import RESET_STEP, Accepted, Close, Create, EnvFailed, EnvReply, EnvRequest, Step

REMEMBERED_EPISODES = 1 << 16
_NEVER: tuple[int, None] = (0, None)


class Pool:
    """See the module. Every event takes the time and returns the commands it leads to."""

    def __init__(self, limits: PoolLimits, env: str, metrics: Metrics, clock: SlotClock) -> None:
        self.failures: Counter[str] = Counter()
        self._env = env
        self._metrics = metrics
        self._instances = Instances(limits, env, metrics, clock, self)
        self._current: dict[int, Instance] = {}
        self._ended: OrderedDict[int, tuple[int, EnvFailed | None]] = OrderedDict()
        self._sessions: dict[str, int] = {}

    # --- events -----------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Command]:
        """Start the first workers."""
        return self._instances.flush(now)

    def submit(self, now: float, node: str, session: int, requests: Iterable[EnvRequest]) -> list[Command]:
        """Requests of one session of a node, in order. A new session ends whatever older ones left behind."""
        known = self._sessions.get(node, session)
        requests = list(requests)
        if session < known:
            self._metrics.add("segue_messages_refused_total", len(requests), reason="stale_session")
            return []
        if session > known:
            self._abandon_all(now, lambda instance: instance.node == node)
        self._sessions[node] = session
        for request in requests:
            if isinstance(request, Create):
                self._create(now, node, session, request)
            elif isinstance(request, Step):
                self._step(now, node, session, request)
            elif isinstance(request, Accepted):
                self._accepted(request)
            else:
                self._close(now, request)
        return self._instances.flush(now)

    def node_lost(self, now: float, node: str) -> list[Command]:
        """Nobody will ask for this node's instances again."""
        self._abandon_all(now, lambda instance: instance.node == node)
        return self._instances.flush(now)

    def worker_said(self, now: float, seat: int, generation: int, body: LoadedSuite | LoadFailed | Reply) -> list[Command]:
        """A message from a worker."""
        self._instances.worker_said(now, seat, generation, body)
        return self._instances.flush(now)

    def worker_lost(self, now: float, seat: int, generation: int, detail: str) -> list[Command]:
        """A worker died of itself, or its channel broke."""
        self._instances.worker_lost(now, seat, generation, detail)
        return self._instances.flush(now)

    def worker_gone(self, now: float, seat: int, generation: int) -> list[Command]:
        """Nothing of a dead worker is left."""
        self._instances.worker_gone(now, seat, generation)
        return self._instances.flush(now)

    def tick(self, now: float) -> list[Command]:
        """Act on the deadlines that have passed."""
        self._instances.tick(now)
        return self._instances.flush(now)

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest."""
        return self._instances.next_deadline()

    @property
    def fault(self) -> Fault | None:
        """Why this pool cannot work at all, if so."""
        return self._instances.fault

    @property
    def ready(self) -> int:
        """Workers that take calls."""
        return self._instances.seats.phases()["ready"]

    def status(self) -> dict[str, Any]:
        """Slots and workers by state, instances by phase, failures by reason, and the fault if there is one."""
        return {
            "slots": {str(state): count for state, count in self._instances.slots.counts.items()},
            "workers": self._instances.seats.phases(),
            "instances": self._instances.phases(),
            "failures": dict(self.failures),
            "fault": self.fault.sentence if self.fault else "",
        }

    # --- requests ---------------------------------------------------------------------------------------------------

    def _create(self, now: float, node: str, session: int, request: Create) -> None:
        current = self._current.get(request.episode)
        ended, failed = self._ended.get(request.episode, _NEVER)
        newest = max(current.create.attempt if current else 0, ended)
        if request.attempt < newest:
            self._refuse(node, session, request.episode, request.attempt, RESET_STEP)
        elif current is not None and current.create.attempt == request.attempt:
            self._repeat(node, session, current, RESET_STEP)
        elif ended == request.attempt:
            self._after_the_end(node, session, request.episode, request.attempt, RESET_STEP, failed)
        else:
            if current is not None:
                self._abandon(now, current)
            self._current[request.episode] = self._instances.add(now, node, session, request)

    def _step(self, now: float, node: str, session: int, request: Step) -> None:
        episode, attempt, step = request.episode, request.attempt, request.step
        instance = self._current.get(episode)
        ended, failed = self._ended.get(episode, _NEVER)
        newest = max(instance.create.attempt if instance else 0, ended)
        if attempt < newest:
            self._refuse(node, session, episode, attempt, step)
        elif instance is None or instance.create.attempt < attempt:
            if ended == attempt:
                self._after_the_end(node, session, episode, attempt, step, failed)
            else:
                self._answer_failure(node, session, episode, attempt, step, Reason.UNKNOWN_INSTANCE, "it was never created here")
        elif step < instance.next_step or (step == instance.next_step and instance.phase == Phase.STEPPING):
            self._repeat(node, session, instance, step)
        elif step > instance.next_step or instance.phase != Phase.IDLE:
            detail = f"step {step} came while step {instance.step} was due"
            self._instances.fail(now, instance, Reason.OUT_OF_ORDER, detail)
        else:
            self._instances.act(now, instance, request.action)

    def _accepted(self, request: Accepted) -> None:
        instance = self._current.get(request.episode)
        if instance is not None and instance.create.attempt == request.attempt:
            for step in [step for step in instance.stored if step <= request.step]:
                del instance.stored[step]

    def _close(self, now: float, request: Close) -> None:
        instance = self._current.get(request.episode)
        ended = self._ended.get(request.episode, _NEVER)[0]
        if instance is not None and instance.create.attempt == request.attempt:
            self._abandon(now, instance)
        elif max(instance.create.attempt if instance else 0, ended) < request.attempt:
            self._remember_end(request.episode, request.attempt, None)  # a Create still on its way must find it closed

    def _repeat(self, node: str, session: int, instance: Instance, step: int) -> None:
        """A request that was made before: its stored reply; nothing while it still runs; a refusal if the reply was accepted."""
        self._metrics.add("segue_messages_refused_total", reason="duplicate")
        if step in instance.stored:
            self._deliver(node, session, instance.stored[step])
        elif step != instance.step:
            self._refuse(node, session, instance.create.episode, instance.create.attempt, step)

    def _after_the_end(self, node: str, session: int, episode: int, attempt: int, step: int, failed: EnvFailed | None) -> None:
        if failed is None:
            self._refuse(node, session, episode, attempt, step)
        else:
            self._deliver(node, session, msgspec.structs.replace(failed, step=step))

    def _refuse(self, node: str, session: int, episode: int, attempt: int, step: int) -> None:
        self._metrics.add("segue_messages_refused_total", reason="stale_attempt")
        self._answer_failure(node, session, episode, attempt, step, Reason.REFUSED_STALE, "this attempt or step is over")

    # --- ends -------------------------------------------------------------------------------------------------------

    def answered(self, instance: Instance, reply: EnvReply) -> None:
        """See `envpool.record.Owner`."""
        self._deliver(instance.node, instance.session, reply)

    def failed(self, instance: Instance, reason: Reason, detail: str, waits: bool) -> None:
        """See `envpool.record.Owner`. Whoever does not wait now learns it from the next request."""
        create = instance.create
        failure = EnvFailed(create.episode, create.attempt, instance.step, str(CLASS_OF[reason]), str(reason), detail)
        self._count_failure(reason)
        self._remember_end(create.episode, create.attempt, failure)
        del self._current[create.episode]
        if waits:
            self._deliver(instance.node, instance.session, failure)

    def _abandon_all(self, now: float, which: Callable[[Instance], bool]) -> None:
        for instance in [i for i in self._current.values() if which(i)]:
            self._abandon(now, instance)

    def _abandon(self, now: float, instance: Instance) -> None:
        create = instance.create
        del self._current[create.episode]
        self._remember_end(create.episode, create.attempt, None)
        self._instances.abandon(now, instance)

    def _remember_end(self, episode: int, attempt: int, failed: EnvFailed | None) -> None:
        self._ended[episode] = (attempt, failed)
        self._ended.move_to_end(episode)
        if len(self._ended) > REMEMBERED_EPISODES:
            self._ended.popitem(last=False)

    def _answer_failure(
        self, node: str, session: int, episode: int, attempt: int, step: int, reason: Reason, detail: str
    ) -> None:
        self._count_failure(reason)
        self._deliver(node, session, EnvFailed(episode, attempt, step, str(CLASS_OF[reason]), str(reason), detail))

    def _count_failure(self, reason: Reason) -> None:
        self.failures[str(reason)] += 1
        self._metrics.add("segue_env_failures_total", 1.0, env=self._env, **{"class": str(CLASS_OF[reason])})
        self._metrics.add("segue_env_failure_reasons_total", env=self._env, reason=GROUP_OF[reason])

    def _deliver(self, node: str, session: int, reply: EnvReply) -> None:
        self._instances.out.append(Deliver(node, session, reply))
