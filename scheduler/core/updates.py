"""Bringing new weights to the nodes: one broadcast at a time to those that have weights, always of the newest version.

weights ready → choose nodes (all that are behind, or a rolling share of them) → one transfer for the sender and these nodes →
each node reports `Loaded`, or is fenced when the deadline passes → the next round, if nodes are behind. Versions published
meanwhile wait, and so do those that the policy holds back (`policy`); only the newest of them is ever sent. A transfer that
fails is abandoned, the members it names are fenced, and the next round begins with who is left, under a new transfer and group
id.

Nodes without weights have rounds of their own, beside that one: a join that hangs holds up nobody's update. What fails again and
again is tried after ever longer pauses: a node that was fenced over its weights or whose joins fail, and a broadcast that
brought nobody forward; the latter ends the run after some attempts.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.core.bill import Bill
from scheduler.core.commands import Abandon, BeginTransfer, Fatal, UpdateDone, Warn
from scheduler.core.leases import Leases
from scheduler.core.nodes import Node
from scheduler.core.policy import UpdatePolicy
from scheduler.core.rests import Rests
from scheduler.core.round import FIGURES, Round
from scheduler.core.tables import Tables
from scheduler.errors import CallRefused
from segue.ports.rollout import Loaded, LoadFailed
from segue.ports.transfer import Transfer, TransferResult, members_of, node_of
from segue.trajectory import NO_VERSION

ROUND = "round"
MAX_JOINS = 4
"""Rounds of joining nodes at a time; who joins meanwhile comes along together in the next one."""
MAX_LOAD_FAILURES = 3
"""A node that failed to load so many times in a row is fenced: its process starts anew or stays out."""
MAX_BARREN = 5
"""So many rounds in a row that brought nobody forward end the run, if nobody has the newest weights or nobody is to blame."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Before the next attempt after a first failure, and at most. A learner that died is noticed before `MAX_BARREN` attempts."""
WARN_FAILURES = 3
"""A node that failed so many times in a row is worth a warning."""
UPDATE = ""
"""Key of the rests between updates; the others are names of nodes."""


class Updates:
    """The updates in progress by transfer id, and the figures of those that are over.

    `pressing` says that a version must not be held back. `held`: the policy holds the newest one back now. `bill`: what they
    cost.
    """

    def __init__(self, tables: Tables, leases: Leases, pressing: Callable[[], bool]) -> None:
        config = tables.config
        self._t = tables
        self._leases = leases
        self._rolling = config.update.rolling
        self._ranks = config.rollout.ranks
        self._deadline = config.update.deadline_seconds
        self._transfer_deadline = min(config.weightsync.deadline_seconds, config.update.deadline_seconds)
        self._pressing = pressing
        self.policy = UpdatePolicy(config.update, config.staleness.max_age)
        self.bill = Bill(tables.meter, config.update.reprefill_window)
        self.held = False
        self._begun = NO_VERSION  # the newest that a round was begun for
        self._held_back = NO_VERSION  # the newest that was ever held back
        self._address = ""
        self._groups: dict[tuple[tuple[str, int], ...], int] = {}
        self._rests = Rests(tables.timers, PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        self.next_transfer = 1
        self.rounds: dict[int, Round] = {}
        self.barren = 0
        self._blameless = 0
        self.figures = dict.fromkeys(FIGURES, 0.0)

    # --- the newest version ---------------------------------------------------------------------------------------------

    def published(self, step: int, address: str, trained: int) -> None:
        """The learner has weights of `step`. Publishing the newest step again (a lost reply) gives no new version."""
        versions = self._t.versions
        again = versions.newest != NO_VERSION and versions.step(versions.newest) == step
        if step != trained and not again:
            raise CallRefused(f"weights of step {step} are published, but {trained} steps are trained")
        self._address = address
        if again:
            return
        self._count_coalesced()
        versions.publish(step)
        self._t.standing = True

    def _count_coalesced(self) -> None:
        """The newest version is about to be followed by another: if no node was to load it yet, none ever will."""
        newest = self._t.versions.newest
        if newest > self._begun != NO_VERSION:
            self._t.tally.count("updates_coalesced", "reprefill" if newest == self._held_back else "busy")

    def behind(self) -> list[Node]:
        """Living nodes that do not run the newest version."""
        newest, nodes = self._t.versions.newest, self._t.nodes
        if newest == NO_VERSION or nodes.all_run(newest):
            return []
        self._t.meter.operations += len(nodes)
        return [node for node in nodes if node.version != newest]

    def complete(self) -> bool:
        """Every node that had weights runs the newest ones; at first, every node that was there to be given any."""
        if self._t.versions.newest == NO_VERSION:
            return False
        first = {transfer for transfer, round in self.rounds.items() if round.first}
        return not any(node.version != NO_VERSION or node.update in first for node in self.behind())

    def oldest_coming(self) -> int:
        """The oldest version that a node may yet load: one that joins may be brought an older one than the others run by then."""
        return min((round.transfer.version for round in self.rounds.values()), default=self._t.versions.next_id)

    # --- rounds ---------------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Begin the rounds that can begin: the next update, if none is running and nodes are behind, and joins beside it."""
        t = self._t
        self.held = False
        updating = any(not round.joining for round in self.rounds.values()) or UPDATE in self._rests
        joins = sum(round.joining for round in self.rounds.values())
        if t.stopped or (updating and (joins >= MAX_JOINS or not t.nodes.running[NO_VERSION])):
            return
        behind = [node for node in self.behind() if node.update is None]
        running = [node for node in behind if node.version != NO_VERSION]
        joining = [node for node in behind if node.version == NO_VERSION and node.name not in self._rests]
        if running and not updating and self._release(running, now):
            self._begin(self._choose(running), False, now)
        if joining and joins < MAX_JOINS:
            self._begin(joining, True, now)

    def _release(self, running: list[Node], now: float) -> bool:
        """Whether the newest version goes out. Once some node was to load it, the others follow, and failed attempts are
        repeated."""
        versions = self._t.versions
        newest = versions.newest
        if newest == self._begun or not self.policy.holds:
            return True
        behind = versions.step(newest) - min(versions.step(node.version) for node in running)
        self.held = not self.policy.release(behind, self._pressing(), self.bill.share(now))
        if self.held:
            self._held_back = newest
        return not self.held

    def spent(self, node: str, session: int, tokens: float, seconds: float, now: float) -> None:
        """A node's word on what updates have cost it."""
        self.bill.said(node, session, tokens, seconds, now)
        if self.held and self.policy.affordable(self.bill.share(now)):
            self._t.standing = True

    def rested(self, key: str) -> None:
        """A pause is over."""
        self._rests.over(key)
        self._t.standing = True

    def _choose(self, behind: list[Node]) -> list[Node]:
        """All, or the share that is furthest behind."""
        share = max(1, int(self._rolling * len(self._t.nodes) + 1e-9))
        return sorted(behind, key=lambda n: (n.version, n.name))[:share]

    def _begin(self, members: list[Node], joining: bool, now: float) -> None:
        t = self._t
        members = sorted(members, key=lambda node: node.name)
        version = t.versions.newest
        transfer = Transfer(
            version=version,
            step=t.versions.step(version),
            transfer=self.next_transfer,
            group=self._group(members),
            members=[member for node in members for member in members_of(node.name, self._ranks)],
            address=self._address,
            deadline_seconds=self._transfer_deadline,
        )
        self.next_transfer += 1
        first = joining and t.nodes.running[NO_VERSION] == len(t.nodes)
        inflight = self.policy.inflight
        self.rounds[transfer.transfer] = Round(transfer, members, joining, first, inflight, now)
        self._begun = version
        for node in members:
            node.update = transfer.transfer
            node.closed = inflight == "episode"
            t.nodes.touch(node)
        t.timers.arm(ROUND, transfer.transfer, now + self._deadline)
        t.tally.count("transfers")
        t.out.append(BeginTransfer(transfer.transfer, transfer, [(node.name, node.session) for node in members], inflight))

    def _group(self, members: list[Node]) -> int:
        """The process group of exactly these sessions if their last transfer in it went well, else a new one."""
        living = {(node.name, node.session) for node in self._t.nodes}
        self._groups = {key: group for key, group in self._groups.items() if living.issuperset(key)}
        key = tuple((node.name, node.session) for node in members)
        return self._groups.setdefault(key, self.next_transfer)

    # --- what members and sender report ---------------------------------------------------------------------------------

    def loaded(self, node: Node, report: Loaded, now: float) -> int:
        """The node's engine runs the version of its round. How many others still load (0 if the report does not count)."""
        round = self._of(node, report.update)
        if round is None or report.version != round.transfer.version:
            self._t.tally.count("refused", "unexpected")
            return 0
        del round.expecting[node.name]
        round.loaded.append(node.name)
        self._t.nodes.loaded(node, report.version)
        node.load_failures = 0
        self._rests.succeeded(node.name)
        self._open(node)
        figures = self.figures
        figures["loads"] += 1
        figures["stage_seconds"] += report.stage_seconds
        figures["drain_seconds"] += report.drain_seconds
        figures["pause_seconds"] += report.pause_seconds
        self._t.standing = self._t.room = True
        self._end_if_over(round, now)
        return len(round.expecting)

    def load_failed(self, node: Node, report: LoadFailed, now: float) -> None:
        """The node could not load. Unless it is unusable now, the sender's result decides whether that was its own fault."""
        round = self._of(node, report.update)
        if round is None:
            self._t.tally.count("refused", "unexpected")
            return
        round.reason = f"{node.name}: {report.reason}"
        if report.fatal:
            self._fence(round, node, "load_failed", round.reason, now)
            return
        del round.expecting[node.name]
        round.failed.append(node)
        if round.sent:
            self._settle_failed(round, now)
        self._end_if_over(round, now)

    def result(self, result: TransferResult, now: float) -> None:
        """The sender's word on the transfer."""
        round = self.rounds.get(result.transfer)
        if round is None or round.sent:
            self._t.tally.count("refused", "unexpected")
            return
        if not result.ok:
            self._failed(round, result.missing, result.reason, now)
            return
        figures = self.figures
        figures["transfers"] += 1
        figures["bytes"] += result.bytes
        figures["gather_seconds"] += result.gather_seconds
        figures["transfer_seconds"] += result.transfer_seconds
        round.sent = True
        self._blameless = 0
        self._settle_failed(round, now)
        self._end_if_over(round, now)

    def send_failed(self, transfer: int, reason: str, now: float) -> None:
        """The sender could not be reached."""
        round = self.rounds.get(transfer)
        if round is None or round.sent:
            self._t.tally.count("refused", "unexpected")
        else:
            self._failed(round, [], reason, now)

    def left(self, node: Node, now: float) -> None:
        """The node's session ended."""
        for round in [round for round in self.rounds.values() if node in round.members]:
            round.left.add(node.name)
            round.expecting.pop(node.name, None)
            if node in round.failed:
                round.failed.remove(node)
            self._end_if_over(round, now)

    def expired(self, transfer: int, now: float) -> None:
        """The deadline of a round: who has not loaded by now is fenced, and the others go on."""
        round = self.rounds.get(transfer)
        if round is None:
            return
        for node in list(round.expecting.values()):
            round.reason = round.reason or f"{node.name} did not load within {self._deadline:g} s"
            self._fence(round, node, "update_deadline", round.reason, now)
        if not round.sent:
            self._t.tally.count("transfers_unanswered")
            self._forget_group(round)
            round.sent = True
            self._settle_failed(round, now)
        self._end_if_over(round, now)

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _of(self, node: Node, update: int) -> Round | None:
        """The round in which this node's report counts."""
        round = self.rounds.get(update)
        if round is None or node.update != update or node.name not in round.expecting:
            return None
        return round

    def _open(self, node: Node) -> None:
        """The node is in no update any more and may be given leases."""
        node.update = None
        node.closed = False
        self._leases.offer(node)

    def _fence(self, round: Round, node: Node, reason: str, why: str, now: float) -> None:
        round.fenced = True
        self._leases.fence(node, reason, now)
        self._rest(node, why, now)

    def _rest(self, node: Node, why: str, now: float) -> None:
        """The node's next attempt to get weights waits, the longer the more have failed."""
        t = self._t
        failures = self._rests.failed(node.name, now)
        if failures == WARN_FAILURES and t.nodes.running[NO_VERSION] < len(t.nodes):
            t.out.append(
                Warn(
                    f"{node.name} could not be given weights {failures} times in a row ({why}): it is tried again ever more "
                    f"rarely, every {LONGEST_PAUSE_SECONDS:g} s in the end; the other nodes go on without it."
                )
            )

    def _settle_failed(self, round: Round, now: float) -> None:
        """Weights arrived and yet these did not load: they try again, some times."""
        for node in round.failed:
            round.left.add(node.name)
            node.load_failures += 1
            self._t.tally.count("load_failures")
            if node.load_failures >= MAX_LOAD_FAILURES:
                self._fence(round, node, "load_failed", round.reason, now)
            else:
                self._open(node)
        round.failed = []

    def _failed(self, round: Round, missing: list[str], reason: str, now: float) -> None:
        """The broadcast broke: fence who is missing; the others discard what they have and start again."""
        t = self._t
        t.tally.count("transfers_failed")
        self._forget_group(round)
        round.reason = reason
        lost = {node_of(member) for member in missing}
        fenced, survivors = 0, [node for node in round.members if node.alive and node.update == round.transfer.transfer]
        for node in [node for node in survivors if node.name in lost]:
            fenced += 1
            survivors.remove(node)
            self._fence(round, node, "update_deadline", reason, now)
        for node in survivors:
            t.out.append(Abandon(node.name, node.session, round.transfer.transfer, reason))
            self._open(node)
            if round.joining and not (fenced or round.loaded):
                self._rest(node, reason, now)
        some_left = any(node.alive for node in round.members)
        self._close(round)
        self._blameless = 0 if fenced else self._blameless + 1
        self._judge(round, bool(round.loaded) or (fenced > 0 and some_left), now)

    def _close(self, round: Round) -> None:
        del self.rounds[round.transfer.transfer]
        self._t.timers.disarm(ROUND, round.transfer.transfer)
        self._lift_quotas(round)

    def _lift_quotas(self, round: Round) -> None:
        """Nobody of this round loads any more for whom a share of admission would be kept."""
        t = self._t
        for node in t.sharing:
            if node in round.members:
                node.quota = None
        t.sharing = [node for node in t.sharing if node.quota is not None]
        t.room = True

    def _forget_group(self, round: Round) -> None:
        self._groups = {key: group for key, group in self._groups.items() if group != round.transfer.group}

    def _end_if_over(self, round: Round, now: float) -> None:
        if round.transfer.transfer not in self.rounds or round.expecting:
            return
        self._lift_quotas(round)
        if round.failed or not round.sent:
            return
        self._close(round)
        if round.loaded:
            self.figures["updates"] += 1
            if not round.joining:
                self._t.tally.count("updates", round.inflight)
            seconds = now - round.began_at
            self._t.out.append(
                UpdateDone(round.transfer.version, round.transfer.step, sorted(round.loaded), sorted(round.left), seconds)
            )
        self._judge(round, bool(round.loaded), now)

    def _judge(self, round: Round, forward: bool, now: float) -> None:
        """Rounds that bring nobody forward must not repeat for ever, nor at once. One whose members all went meanwhile, and not
        because of it, says nothing of the next: others come in their place."""
        t = self._t
        t.standing = True
        if round.joining and not round.first:
            return  # who joins a running training has pauses of its own, and the others go on
        if forward:
            self.barren = 0
        elif round.fenced or any(node.alive for node in round.members):
            self.barren += 1
        if forward:
            self._rests.succeeded(UPDATE)
        elif not round.joining:
            self._rests.failed(UPDATE, now)
        if self.barren < MAX_BARREN:
            return
        newest = t.versions.newest
        version, why = f"Version {round.transfer.version} (step {round.transfer.step})", round.reason or "no node was left"
        if not any(node.version == newest for node in t.nodes):
            what = f"{version} reached no rollout node in {self.barren} attempts"
        elif self._blameless >= MAX_BARREN:
            what = f"{version} could not be sent to {', '.join(node.name for node in round.members)} in {self.barren} attempts"
        else:
            return
        t.out.append(Fatal("weightsync", f"{what}: {why.rstrip('.')}{'' if why.endswith('?') else '.'}"))
