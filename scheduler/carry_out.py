"""The core's commands, carried out: what they mean for the queue and the batches at once, and for everybody else after the
journal.

`CarryOut(commands)` returns what must wait until the journal has the message that caused them: orders, wake-ups, run events.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from scheduler.core import commands as c
from scheduler.links import Later
from scheduler.queue import LogReader, Place, SpillFailed
from segue.clock import Compute
from segue.config import Config
from segue.episode import EpisodeSnapshot, Purpose
from segue.ports import learner as learner_port
from segue.ports import rollout as rollout_port
from segue.ports import transfer as transfer_port
from segue.ports.rpc import PeerError, PeerTimeout, RemoteError, ask

if TYPE_CHECKING:
    from scheduler.shell import SchedulerShell

log = logging.getLogger(__name__)

Thunk = Callable[[], None]


def sampling_seed(run_seed: int, purpose: str, group: int, member: int) -> int:
    """The seed of an episode's sampling, the same for all its attempts; 31 bits."""
    return zlib.crc32(f"{run_seed}/{purpose}/{group}/{member}".encode()) & 0x7FFFFFFF


class SpilledLease:
    """A lease whose log must be read from disk first: beside the loop, so that everybody else is answered meanwhile."""

    def __init__(self, lease: rollout_port.Lease, log: LogReader, compute: Compute) -> None:
        self._lease = lease
        self._log = log
        self._compute = compute

    async def fetch(self) -> rollout_port.Order:
        """The lease; or a drop, which changes nothing at the node, if it was withdrawn and its log discarded meanwhile."""
        lease = self._lease
        try:
            payloads = await self._compute.run(self._log, cost=0.0)
        except SpillFailed:
            if not self._log.gone:
                raise
        if self._log.gone:
            return rollout_port.Drop(lease.episode, lease.attempt, "withdrawn")
        return _with_log(lease, payloads)


def _with_log(lease: rollout_port.Lease, payloads: list[bytes]) -> rollout_port.Lease:
    assert len(payloads) == lease.snapshot.next_seq, "the log is what the core accepted"
    return msgspec.structs.replace(lease, snapshot=msgspec.structs.replace(lease.snapshot, deltas=payloads))


class CarryOut:
    """One method per kind of command. Each acts on the queue now and returns what is to be done after the commit, if anything."""

    def __init__(self, shell: SchedulerShell, config: Config) -> None:
        self._shell = shell
        self._config = config
        self._kinds: dict[type, Callable[[Any], Thunk | None]] = {
            c.Refuse: _nothing,
            c.Ignore: _nothing,
            c.Resend: _nothing,
            c.Forget: self._forget,
            c.Grant: self._grant,
            c.DropAttempt: self._drop,
            c.ParkAttempt: self._park,
            c.ExtendSlice: self._extend,
            c.BeginTransfer: self._begin_transfer,
            c.Abandon: self._abandon,
            c.UpdateDone: self._update_done,
            c.Fence: self._fence,
            c.FormBatch: self._form_batch,
            c.ReleaseBatch: self._release_batch,
            c.EvalDone: self._eval_done,
            c.Warn: self._warn,
            c.Fatal: self._fatal,
            c.StopNodes: self._stop_nodes,
        }

    def __call__(self, commands: Sequence[c.Command], now: float) -> list[Thunk]:
        """Carry out commands in their order."""
        after: list[Thunk] = []
        if not commands:
            return after
        todo = list(reversed(commands))
        while todo:
            command = todo.pop()
            if type(command) is c.NeedTasks:  # not by recursion: a large max_age opens many batches of groups in a row
                todo.extend(reversed(self._shell.draw_tasks(command.count, now)))
                continue
            thunk = self._kinds[type(command)](command)
            if thunk is not None:
                after.append(thunk)
        return after

    def _order(self, node: str, session: int, order: rollout_port.Order | Later) -> Thunk:
        return lambda: self._shell.exchanges.link(node).order(session, order)

    # --- episodes -------------------------------------------------------------------------------------------------------

    def _forget(self, command: c.Forget) -> None:
        self._shell.queue.discard(command.episode)

    def _grant(self, grant: c.Grant) -> Thunk:
        seed = sampling_seed(self._config.seed, grant.purpose, grant.group, grant.member)
        lease = rollout_port.Lease(
            episode=grant.episode,
            attempt=grant.attempt,
            group=grant.group,
            member=grant.member,
            purpose=grant.purpose,
            priority=grant.priority,
            task=grant.task,
            sampling=rollout_port.Sampling(grant.temperature, seed),
            snapshot=EpisodeSnapshot(grant.turn, grant.next_seq, [], grant.seconds),
            slice_tokens=self._config.rollout.slice_tokens if grant.purpose == Purpose.TRAIN else 0,
        )
        log = self._shell.queue.reader(grant.episode)
        order = SpilledLease(lease, log, self._shell.compute) if log.on_disk else _with_log(lease, log())
        return self._order(grant.node, grant.session, order)

    def _drop(self, drop: c.DropAttempt) -> Thunk:
        return self._order(drop.node, drop.session, rollout_port.Drop(drop.episode, drop.attempt, drop.reason))

    def _park(self, park: c.ParkAttempt) -> Thunk:
        return self._order(park.node, park.session, rollout_port.ParkOrder(park.episode, park.attempt))

    def _extend(self, extend: c.ExtendSlice) -> Thunk:
        order = rollout_port.Extend(extend.episode, extend.attempt, self._config.rollout.slice_tokens)
        return self._order(extend.node, extend.session, order)

    # --- batches --------------------------------------------------------------------------------------------------------

    def _form_batch(self, form: c.FormBatch) -> Thunk:
        plan = form.plan
        for group in plan.groups:
            for member in group.members:
                self._shell.queue.move(member.episode, Place.KEPT)

        def ready() -> None:
            self._shell.delivery.plans[plan.step] = plan
            self._shell.wake()

        return ready

    def _release_batch(self, release: c.ReleaseBatch) -> Thunk:
        for episode in release.episodes:
            self._shell.queue.discard(episode)
        return lambda: self._shell.delivery.release(release.step)

    # --- updates --------------------------------------------------------------------------------------------------------

    def _begin_transfer(self, begin: c.BeginTransfer) -> Thunk:
        update = self._config.update
        order = rollout_port.BeginUpdate(
            begin.update, begin.transfer, begin.inflight, update.drain_seconds, update.deadline_seconds
        )

        def start() -> None:
            for node, session in begin.nodes:
                self._shell.exchanges.link(node).order(session, order)
            self._shell.spawn(self._send(begin.transfer))

        return start

    async def _send(self, transfer: transfer_port.Transfer) -> None:
        """Ask the learner to send; how it went comes back as a call of its own."""
        shell = self._shell
        try:
            if shell.sender is None:
                raise PeerTimeout("the learner is not connected")
            await ask(shell.sender, learner_port.SEND_WEIGHTS, learner_port.SendWeights(transfer), transfer.deadline_seconds)
        except (PeerError, RemoteError) as error:
            reason = "timeout" if isinstance(error, PeerTimeout) else "lost" if isinstance(error, PeerError) else "error"
            shell.core.tables.tally.count("rpc_failures", reason)
            log.warning("the learner was not reached for transfer %d: %s", transfer.transfer, error)
            await shell.send_failed(transfer.transfer, f"the learner did not take the request ({error})")

    def _abandon(self, abandon: c.Abandon) -> Thunk:
        return self._order(abandon.node, abandon.session, rollout_port.AbandonUpdate(abandon.update, abandon.reason))

    def _update_done(self, done: c.UpdateDone) -> Thunk:
        data = {
            "version": done.version,
            "step": done.step,
            "loaded": done.loaded,
            "left": done.left,
            "seconds": done.seconds,
        }
        return self._event("update", data)

    # --- nodes and the run ----------------------------------------------------------------------------------------------

    def _fence(self, fence: c.Fence) -> Thunk:
        link = self._shell.exchanges.link(fence.node)
        link.end(fence.session)
        if fence.reason == "replaced":
            return lambda: None
        sentence = f"{fence.node} was fenced ({fence.reason}): its episodes go on elsewhere from their last deltas."
        return self._event("warning", {"sentence": sentence})

    def _eval_done(self, done: c.EvalDone) -> Thunk:
        return self._event("eval", {"name": done.name})

    def _warn(self, warn: c.Warn) -> Thunk:
        return self._event("warning", {"sentence": warn.sentence})

    def _fatal(self, fatal: c.Fatal) -> Thunk:
        if not fatal.users:
            return lambda: self._shell.fail(fatal.part, fatal.sentence)
        return lambda: self._shell.fail_users(fatal.part, fatal.sentence, fatal.remedy, fatal.raised)

    def _stop_nodes(self, stop: c.StopNodes) -> Thunk:
        def send() -> None:
            for node, session in stop.nodes:
                self._shell.exchanges.link(node).order(session, rollout_port.Stop(stop.reason))

        return send

    def _event(self, what: str, data: dict[str, Any]) -> Thunk:
        def tell() -> None:
            self._shell.events.add(what, data)
            self._shell.wake()

        return tell


def _nothing(command: c.Command) -> None:
    """Part of the reply to the node; the shell reads it there."""
