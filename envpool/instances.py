"""Instances on workers: where each lives, which call of it runs, and what becomes of it. Pure: no I/O, no threads, no clock.

An instance belongs to one attempt of one episode:

    queued → making → resetting → (replaying) → idle ⇄ stepping → closing → gone

Every phase has a deadline: queued until `create_seconds` (then no_capacity); making, resetting, stepping and closing until theirs
(then the worker is killed, with whatever else it hosts); idle until `idle_seconds` (then it is closed: its node has forgotten
it). An instance that is no longer wanted while a call of it runs is closed when the call returns: creation is owned to its end,
nothing leaks. An instance that raised is closed and never used again.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

import msgspec

from envpool.commands import CLASS_OF, Command, Fault, KillReason, Reason, Send
from envpool.deadlines import Deadlines
from envpool.environment import effect_key
from envpool.messages import (
    Act,
    Acted,
    Call,
    Dispose,
    Disposed,
    LoadedSuite,
    LoadFailed,
    Made,
    Make,
    Observed,
    Raised,
    Reply,
    Reset,
    RestoreTo,
)
from envpool.record import CLOCK_STATES, TIMEOUTS, Instance, Owner, Phase, PoolLimits
from envpool.seats import SeatPhase, Seats
from envpool.slots import Slots, SlotState
from segue.episode import Task
from segue.metrics import Metrics, SlotClock
from segue.ports.envpool import RESET_STEP, Create, Created, EnvReply, Observation, Resume, Stepped, observation_digest

REMEMBERED_TASKS = 1 << 12


class Instances:
    """See the module. Commands gather in `out`; `flush` hands them over, once per event."""

    def __init__(self, limits: PoolLimits, env: str, metrics: Metrics, clock: SlotClock, owner: Owner) -> None:
        self.limits = limits
        self._seconds = {
            Phase.MAKING: limits.create_seconds,
            Phase.RESETTING: limits.reset_seconds,
            Phase.CLOSING: limits.close_seconds,
        }
        self.slots = Slots(limits.workers, limits.instances)
        self.seats = Seats(limits.workers, limits.start_seconds, limits.respawns_per_minute)
        self.out: list[Command] = []
        self._env = env
        self._metrics = metrics
        self._waited = metrics.histogram("segue_queue_wait_seconds", queue="requests")
        self._reset_seconds = metrics.histogram("segue_env_reset_seconds", env=env)
        self._step_seconds = metrics.histogram("segue_env_step_seconds", env=env)
        self._clock = clock
        self._owner = owner
        self._instances: dict[int, Instance] = {}
        self._hosted: list[set[int]] = [set() for _ in range(limits.workers)]
        self._queue: deque[int] = deque()
        self._depth = 0
        self._first_seen: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._numbers = itertools.count(1)
        self._deadlines = Deadlines()

    @property
    def fault(self) -> Fault | None:
        """Why the workers cannot work at all, if so."""
        return self.seats.fault

    def phases(self) -> dict[str, int]:
        """How many instances are in each phase."""
        counts = Counter(instance.phase for instance in self._instances.values())
        return {str(phase): counts[phase] for phase in Phase}

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest."""
        mine, theirs = self._deadlines.next(), self.seats.next_deadline()
        if mine is None or theirs is None:
            return theirs if mine is None else mine
        return min(mine, theirs)

    # --- what nodes want --------------------------------------------------------------------------------------------

    def add(self, now: float, node: str, session: int, create: Create) -> Instance:
        """A new instance; it gets a slot when there is one."""
        instance = Instance(next(self._numbers), node, session, create, now)
        self._instances[instance.number] = instance
        self._queue.append(instance.number)
        self._deadlines.set(instance.number, now + self.limits.create_seconds)
        return instance

    def act(self, now: float, instance: Instance, action: str) -> None:
        """Take the next step; the instance is idle."""
        assert instance.phase == Phase.IDLE, instance.phase
        key = effect_key(instance.create.episode, instance.next_step, action)
        self._ask(now, instance, Phase.STEPPING, lambda number, call: Act(number, call, action, key))

    def abandon(self, now: float, instance: Instance) -> None:
        """Nobody wants the instance any more: close it, when the call that runs has returned if there is one."""
        instance.wanted = False
        instance.stored.clear()
        if instance.phase == Phase.QUEUED:
            self._forget(instance)
        elif instance.phase == Phase.IDLE:
            self._dispose(now, instance)

    def fail(self, now: float, instance: Instance, reason: Reason, detail: str, waits: bool = True) -> None:
        """The instance is lost to its node: say so, and close what is left of it."""
        self._owner.failed(instance, reason, detail, waits)
        self.abandon(now, instance)

    # --- what workers and the clock say -----------------------------------------------------------------------------

    def worker_said(self, now: float, seat: int, generation: int, body: LoadedSuite | LoadFailed | Reply) -> None:
        """A message from a worker. What nobody waits for any more is refused and counted."""
        if not self.seats.is_current(seat, generation):
            self._metrics.add("segue_messages_refused_total", reason="unexpected")
        elif isinstance(body, LoadedSuite):
            self.seats.ready(seat)
            self.slots.open(seat)
            self._move_clock(self.slots.slots_of(seat), "wait_action")
        elif isinstance(body, LoadFailed):
            self.seats.refuse(Fault(body.user, body.sentence))
            self._end_worker(now, seat, KillReason.LOST, Reason.POOL_FAILED, body.sentence)
        else:
            instance = self._instances.get(body.instance)
            if instance is None or instance.call != body.call or self.slots.seat_of(instance.slot) != seat:
                self._metrics.add("segue_messages_refused_total", reason="unexpected")
            else:
                self._replied(now, instance, body)

    def worker_lost(self, now: float, seat: int, generation: int, detail: str) -> None:
        """A worker died of itself, or its channel broke: whoever waits for it fails at once."""
        if self.seats.is_current(seat, generation):
            self._metrics.add("segue_env_crashes_total", env=self._env)
            self._end_worker(now, seat, KillReason.LOST, Reason.WORKER_DIED, detail)

    def worker_gone(self, now: float, seat: int, generation: int) -> None:
        """Nothing of a dead worker is left: its seat may have another."""
        if self.seats.gone(seat, generation):
            self.slots.restart(seat)

    def tick(self, now: float) -> None:
        """Act on the deadlines that have passed."""
        for number in self._deadlines.due(now):
            self._expired(now, self._instances[number])
        for seat in self.seats.due(now):
            self._end_worker(now, seat, KillReason.START_TIMEOUT, Reason.WORKER_KILLED, "was not ready in time")

    def flush(self, now: float) -> list[Command]:
        """Start workers, give free slots to the queue, and hand out the commands."""
        for spawn in self.seats.pump(now):
            if spawn.generation > 1:
                self._metrics.add("segue_env_respawns_total", env=self._env)
            self.out.append(spawn)
        while self._queue and self._serve(now, self._instances.get(self._queue[0])):
            self._queue.popleft()
        if len(self._queue) != self._depth:
            self._depth = len(self._queue)
            self._metrics.set("segue_queue_depth", self._depth, queue="requests")
        out = self.out
        self.out = []
        return out

    # --- the course of an instance ----------------------------------------------------------------------------------

    def _serve(self, now: float, instance: Instance | None) -> bool:
        """Give the first one in the queue its slot, or its failure. False if it must go on waiting."""
        if instance is None:
            return True  # it was given up while it waited
        if self.fault is not None:
            self.fail(now, instance, Reason.POOL_FAILED, self.fault.sentence)
        elif self.slots.counts[SlotState.FREE]:
            self._place(now, instance)
        elif self.seats.exhausted:
            detail = f"{self.limits.respawns_per_minute} env workers ended within a minute; the last one {self.seats.last_end}"
            self.fail(now, instance, Reason.RESPAWN_LIMIT, detail)
        else:
            return False
        return True

    def _place(self, now: float, instance: Instance) -> None:
        slot = self.slots.lease()
        assert slot is not None
        instance.slot = slot
        self._hosted[self.slots.seat_of(slot)].add(instance.number)
        self._waited.observe(now - instance.asked)
        create = instance.create
        self._ask(
            now, instance, Phase.MAKING, lambda number, call: Make(number, call, create.task, create.member, create.attempt)
        )

    def _ask(self, now: float, instance: Instance, phase: Phase, body: Callable[[int, int], Call]) -> None:
        """Send the instance a call, under the deadline of its phase."""
        seconds = self._seconds.get(phase, self.limits.step_seconds)
        instance.call += 1
        instance.called = now
        self._enter(instance, phase)
        self._deadlines.set(instance.number, now + seconds)
        seat = self.slots.seat_of(instance.slot)
        self.out.append(Send(seat, self.seats.generation(seat), body(instance.number, instance.call)))

    def _replied(self, now: float, instance: Instance, body: Reply) -> None:
        """The call that ran has returned; unless another one follows or the node is to act, the instance is closed."""
        if isinstance(body, Disposed):
            self._forget(instance)
            return
        instance.call += 1  # this one is answered: the same reply again would match nothing
        before = instance.call
        if instance.wanted:
            self._go_on(now, instance, body)
        if not instance.wanted and instance.call == before:
            self._dispose(now, instance)

    def _go_on(self, now: float, instance: Instance, body: Reply) -> None:
        if isinstance(body, Raised):
            reason = Reason.DATA_ERROR if body.failure == CLASS_OF[Reason.DATA_ERROR] else Reason.ENV_ERROR
            self.fail(now, instance, reason, body.detail)
        elif isinstance(body, Made):
            self._made(now, instance, body)
        elif isinstance(body, Observed):
            self._observed(now, instance, body)
        elif instance.phase == Phase.REPLAYING:
            assert isinstance(body, Acted)
            self._replayed(now, instance, body)
        else:
            assert isinstance(body, Acted)
            self._stepped(now, instance, body)

    def _made(self, now: float, instance: Instance, body: Made) -> None:
        instance.resume = Resume(body.resume)
        restore = instance.create.restore
        if restore is not None and restore.snapshot is not None and body.resume == Resume.SNAPSHOT:
            snapshot = restore.snapshot
            self._ask(now, instance, Phase.RESETTING, lambda number, call: RestoreTo(number, call, snapshot))
        elif restore is not None and (restore.snapshot is not None or (restore.replay and body.resume == Resume.PINNED)):
            self.fail(now, instance, Reason.NOT_RESUMABLE, f"the environment declares itself {body.resume}")
        else:
            self._ask(now, instance, Phase.RESETTING, Reset)

    def _observed(self, now: float, instance: Instance, body: Observed) -> None:
        restore = instance.create.restore
        if restore is not None and restore.snapshot is not None:
            instance.next_step = restore.snapshot_turn + 1
        elif not self._same_as_first(instance.create.task, body.observation):
            detail = "a reset to the same task and seed gave another first observation than before"
            self.fail(now, instance, Reason.SEED_MISMATCH, detail)
            return
        self._replay_next(now, instance, body.observation, body.snapshot)

    def _replay_next(self, now: float, instance: Instance, observation: Observation, snapshot: bytes | None) -> None:
        restore = instance.create.restore
        if restore is None or instance.replayed == len(restore.replay):
            self._created(now, instance, observation, snapshot)
            return
        action = restore.replay[instance.replayed].action
        last = instance.replayed + 1 == len(restore.replay)
        key = effect_key(instance.create.episode, instance.next_step, action)
        self._ask(now, instance, Phase.REPLAYING, lambda number, call: Act(number, call, action, key, last))

    def _replayed(self, now: float, instance: Instance, body: Acted) -> None:
        restore = instance.create.restore
        assert restore is not None
        if observation_digest(body.result.observation) != restore.replay[instance.replayed].observation_hash:
            detail = f"replaying turn {instance.next_step} gave another observation than was recorded"
            self.fail(now, instance, Reason.RESTORE_MISMATCH, detail)
            return
        instance.replayed += 1
        instance.next_step += 1
        self._replay_next(now, instance, body.result.observation, body.snapshot)

    def _created(self, now: float, instance: Instance, observation: Observation, snapshot: bytes | None) -> None:
        seconds = now - instance.asked
        self._reset_seconds.observe(seconds)
        create = instance.create
        instance.create = msgspec.structs.replace(create, restore=None)  # its bytes are not needed any more
        reply = Created(create.episode, create.attempt, observation, snapshot, seconds, instance.resume)
        self._rest(now, instance, RESET_STEP, reply)

    def _stepped(self, now: float, instance: Instance, body: Acted) -> None:
        seconds = now - instance.called
        self._step_seconds.observe(seconds)
        step = instance.next_step
        instance.next_step += 1
        create = instance.create
        self._rest(now, instance, step, Stepped(create.episode, create.attempt, step, body.result, body.snapshot, seconds))

    def _rest(self, now: float, instance: Instance, step: int, reply: EnvReply) -> None:
        """The call is answered; the instance waits for the next action."""
        instance.stored[step] = reply
        self._enter(instance, Phase.IDLE)
        self._deadlines.set(instance.number, now + self.limits.idle_seconds)
        self._owner.answered(instance, reply)

    def _same_as_first(self, task: Task, observation: Observation) -> bool:
        """Members of a group, and later attempts, must see what the first one saw."""
        digest = observation_digest(observation)
        first = self._first_seen.setdefault((task.id, task.seed), digest)
        self._first_seen.move_to_end((task.id, task.seed))
        if len(self._first_seen) > REMEMBERED_TASKS:
            self._first_seen.popitem(last=False)
        return first == digest

    # --- ends -------------------------------------------------------------------------------------------------------

    def _dispose(self, now: float, instance: Instance) -> None:
        self.slots.closing(instance.slot)
        self._ask(now, instance, Phase.CLOSING, Dispose)

    def _forget(self, instance: Instance) -> None:
        """The instance is gone, and its slot is free again."""
        del self._instances[instance.number]
        self._deadlines.clear(instance.number)
        if instance.slot >= 0:
            self._hosted[self.slots.seat_of(instance.slot)].discard(instance.number)
            self.slots.free(instance.slot)
            self._move_clock((instance.slot,), "wait_action")

    def _expired(self, now: float, instance: Instance) -> None:
        if instance.phase == Phase.QUEUED:
            self.fail(now, instance, Reason.NO_CAPACITY, f"no slot was free within {self.limits.create_seconds:g} s")
        elif instance.phase == Phase.IDLE:
            self.fail(now, instance, Reason.IDLE_TIMEOUT, f"no action came within {self.limits.idle_seconds:g} s", waits=False)
        else:
            reason, kill = TIMEOUTS[instance.phase]
            self._metrics.add("segue_env_timeouts_total", env=self._env)
            detail = f"was killed because a call did not return within {now - instance.called:.3g} s"
            self._end_worker(
                now, self.slots.seat_of(instance.slot), kill, Reason.WORKER_KILLED, detail, {instance.number: reason}
            )

    def _end_worker(
        self,
        now: float,
        seat: int,
        kill: KillReason,
        reason: Reason,
        detail: str,
        own: dict[int, Reason] | None = None,
    ) -> None:
        """Kill a worker with all it hosts. Instances fail with their `own` reason if they have one, else with `reason`.

        Where the worker died of itself, those with a call in it are suspects (worker_died), idle ones bystanders (worker_killed).
        """
        assert self.seats.phase(seat) in (SeatPhase.STARTING, SeatPhase.READY)
        self._metrics.add("segue_env_kills_total", env=self._env, reason=str(kill))
        self.slots.kill(seat)
        self._move_clock(self.slots.slots_of(seat), "respawn")
        self.out.append(self.seats.end(now, seat, detail))
        for number in sorted(self._hosted[seat]):
            instance = self._instances.pop(number)
            self._deadlines.clear(number)
            idle = instance.phase == Phase.IDLE
            why = Reason.WORKER_KILLED if idle and reason == Reason.WORKER_DIED else reason
            if instance.wanted:
                instance.wanted = False
                self._owner.failed(instance, (own or {}).get(number, why), f"its env worker {detail}", waits=not idle)
        self._hosted[seat].clear()

    def _enter(self, instance: Instance, phase: Phase) -> None:
        instance.phase = phase
        self._clock.move(instance.slot, CLOCK_STATES[phase])

    def _move_clock(self, slots: Iterable[int], state: str) -> None:
        for slot in slots:
            self._clock.move(slot, state)
