"""Bringing new weights to the nodes: one broadcast at a time, always of the newest version.

weights ready → choose nodes (all that are behind, or a rolling share of them; nodes without weights always) → one transfer
for the sender and these nodes → each node reports `Loaded`, or is fenced when the deadline passes → the next round, if nodes
are behind. Versions published meanwhile wait; only the newest of them is ever sent. A transfer that fails is abandoned, the
members it names are fenced, and the next round begins at once with who is left, under a new transfer and group id.
"""

from __future__ import annotations

from scheduler.core.commands import Abandon, BeginTransfer, Fatal, UpdateDone
from scheduler.core.leases import Leases
from scheduler.core.nodes import Node
from scheduler.core.tables import Tables
from scheduler.errors import CallRefused
from segue.ports.scheduler import Loaded, LoadFailed, Transfer, TransferResult
from segue.trajectory import NO_VERSION

ROUND = "round"
MAX_LOAD_FAILURES = 3
"""A node that failed to load so many times in a row is fenced: its process starts anew or stays out."""
MAX_BARREN = 5
"""So many rounds in a row that brought nobody forward, with nobody on the newest weights, end the run."""


class Round:
    """One transfer: `expecting` have yet to load, `failed` could not and wait for the sender's word on why."""

    def __init__(self, transfer: Transfer, members: list[Node], now: float) -> None:
        self.transfer = transfer
        self.members = members
        self.expecting = {node.name: node for node in members}
        self.failed: list[Node] = []
        self.loaded: list[str] = []
        self.left: set[str] = set()
        self.sent = False
        self.reason = ""
        self.began_at = now


class Updates:
    """The update in progress, and the figures of those that are over."""

    def __init__(self, tables: Tables, leases: Leases) -> None:
        config = tables.config
        self._t = tables
        self._leases = leases
        self._rolling = config.update.rolling
        self._deadline = config.update.deadline_seconds
        self._transfer_deadline = min(config.weightsync.deadline_seconds, config.update.deadline_seconds)
        self._closes = config.update.inflight == "episode"
        self._address = ""
        self._groups: dict[tuple[tuple[str, int], ...], int] = {}
        self.next_transfer = 1
        self.round: Round | None = None
        self.barren = 0
        self.figures = {
            "updates": 0.0,
            "bytes": 0.0,
            "gather_seconds": 0.0,
            "transfers": 0.0,
            "transfer_seconds": 0.0,
            "loads": 0.0,
            "stage_seconds": 0.0,
            "drain_seconds": 0.0,
            "pause_seconds": 0.0,
        }

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
        versions.publish(step)
        self._t.standing = True

    def behind(self) -> list[Node]:
        """Living nodes that do not run the newest version."""
        newest, nodes = self._t.versions.newest, self._t.nodes
        if newest == NO_VERSION or nodes.all_run(newest):
            return []
        self._t.meter.operations += len(nodes)
        return [node for node in nodes if node.version != newest]

    # --- rounds ---------------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Begin the next round if none is running and nodes are behind."""
        if self.round is not None or self._t.stopped:
            return
        behind = self.behind()
        if behind:
            self._begin(self._choose(behind), now)

    def _choose(self, behind: list[Node]) -> list[Node]:
        """All, or the share that is furthest behind; nodes without weights hold nothing up and always come along."""
        running = sorted((n for n in behind if n.version != NO_VERSION), key=lambda n: (n.version, n.name))
        share = max(1, int(self._rolling * len(self._t.nodes) + 1e-9))
        chosen = [n for n in behind if n.version == NO_VERSION] + running[:share]
        return sorted(chosen, key=lambda n: n.name)

    def _begin(self, members: list[Node], now: float) -> None:
        t = self._t
        version = t.versions.newest
        transfer = Transfer(
            version=version,
            step=t.versions.step(version),
            transfer=self.next_transfer,
            group=self._group(members),
            members=[node.name for node in members],
            address=self._address,
            deadline_seconds=self._transfer_deadline,
        )
        self.next_transfer += 1
        self.round = Round(transfer, members, now)
        for node in members:
            node.update = transfer.transfer
            node.closed = self._closes
            t.nodes.touch(node)
        t.timers.arm(ROUND, transfer.transfer, now + self._deadline)
        t.tally.count("transfers")
        t.out.append(BeginTransfer(transfer.transfer, transfer, [(node.name, node.session) for node in members]))

    def _group(self, members: list[Node]) -> int:
        """The process group of exactly these sessions if their last transfer in it went well, else a new one."""
        living = {(node.name, node.session) for node in self._t.nodes}
        self._groups = {key: group for key, group in self._groups.items() if living.issuperset(key)}
        key = tuple((node.name, node.session) for node in members)
        return self._groups.setdefault(key, self.next_transfer)

    # --- what members and sender report ---------------------------------------------------------------------------------

    def loaded(self, node: Node, report: Loaded, now: float) -> int:
        """The node's engine runs the version of this round. How many others still load (0 if the report does not count)."""
        round = self._of(node, report.update)
        if round is None or report.version != round.transfer.version:
            self._t.tally.count("refused", "unexpected")
            return 0
        del round.expecting[node.name]
        round.loaded.append(node.name)
        self._t.nodes.loaded(node, report.version)
        node.load_failures = 0
        self._open(node)
        figures = self.figures
        figures["loads"] += 1
        figures["stage_seconds"] += report.stage_seconds
        figures["drain_seconds"] += report.drain_seconds
        figures["pause_seconds"] += report.pause_seconds
        self._t.standing = self._t.room = True
        self._end_if_over(now)
        return len(round.expecting)

    def load_failed(self, node: Node, report: LoadFailed, now: float) -> None:
        """The node could not load. Unless it is unusable now, the sender's result decides whether that was its own fault."""
        round = self._of(node, report.update)
        if round is None:
            self._t.tally.count("refused", "unexpected")
            return
        round.reason = f"{node.name}: {report.reason}"
        if report.fatal:
            self._leases.fence(node, "load_failed", now)
            return
        del round.expecting[node.name]
        round.failed.append(node)
        if round.sent:
            self._settle_failed(round, now)
        self._end_if_over(now)

    def result(self, result: TransferResult, now: float) -> None:
        """The sender's word on the transfer."""
        round = self.round
        if round is None or round.transfer.transfer != result.transfer or round.sent:
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
        self._settle_failed(round, now)
        self._end_if_over(now)

    def send_failed(self, transfer: int, reason: str, now: float) -> None:
        """The sender could not be reached."""
        if self.round is None or self.round.transfer.transfer != transfer:
            self._t.tally.count("refused", "unexpected")
        else:
            self._failed(self.round, [], reason, now)

    def left(self, node: Node, now: float) -> None:
        """The node's session ended."""
        round = self.round
        if round is None or node not in round.members:
            return
        round.left.add(node.name)
        round.expecting.pop(node.name, None)
        if node in round.failed:
            round.failed.remove(node)
        self._end_if_over(now)

    def expired(self, transfer: int, now: float) -> None:
        """The deadline of a round: who has not loaded by now is fenced, and the others go on."""
        round = self.round
        if round is None or round.transfer.transfer != transfer:
            return
        for node in list(round.expecting.values()):
            round.reason = round.reason or f"{node.name} did not load within {self._deadline:g} s"
            self._leases.fence(node, "update_deadline", now)
        if not round.sent:
            self._t.tally.count("transfers_unanswered")
            self._forget_group(round)
            round.sent = True
            self._settle_failed(round, now)
        self._end_if_over(now)

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _of(self, node: Node, update: int) -> Round | None:
        """The round in which this node's report counts."""
        round = self.round
        if round is None or round.transfer.transfer != update or node.update != update or node.name not in round.expecting:
            return None
        return round

    def _open(self, node: Node) -> None:
        """The node is in no update any more and may be given leases."""
        node.update = None
        node.closed = False
        self._leases.offer(node)

    def _settle_failed(self, round: Round, now: float) -> None:
        """Weights arrived and yet these did not load: they try again, some times."""
        for node in round.failed:
            round.left.add(node.name)
            node.load_failures += 1
            self._t.tally.count("load_failures")
            if node.load_failures >= MAX_LOAD_FAILURES:
                self._leases.fence(node, "load_failed", now)
            else:
                self._open(node)
        round.failed = []

    def _failed(self, round: Round, missing: list[str], reason: str, now: float) -> None:
        """The broadcast broke: fence who is missing; the others discard what they have and start again."""
        t = self._t
        t.tally.count("transfers_failed")
        t.timers.disarm(ROUND, round.transfer.transfer)
        self._forget_group(round)
        round.reason = reason
        fenced = 0
        for node in round.members:
            if not node.alive:
                continue
            if node.name in missing and node.update == round.transfer.transfer:
                fenced += 1
                self._leases.fence(node, "update_deadline", now)
            elif node.update == round.transfer.transfer:
                t.out.append(Abandon(node.name, node.session, round.transfer.transfer, reason))
                self._open(node)
        self.round = None
        self._lift_quotas()
        survivors = any(node.alive for node in round.members)
        self._judge(round, forward=bool(round.loaded) or (fenced > 0 and survivors))

    def _lift_quotas(self) -> None:
        """Nobody loads any more for whom a share of admission would be kept."""
        for node in self._t.sharing:
            node.quota = None
        self._t.sharing.clear()
        self._t.room = True

    def _forget_group(self, round: Round) -> None:
        self._groups = {key: group for key, group in self._groups.items() if group != round.transfer.group}

    def _end_if_over(self, now: float) -> None:
        round = self.round
        if round is None or round.expecting:
            return
        self._lift_quotas()
        if round.failed or not round.sent:
            return
        t = self._t
        t.timers.disarm(ROUND, round.transfer.transfer)
        self.round = None
        t.standing = True
        if round.loaded:
            self.figures["updates"] += 1
            seconds = now - round.began_at
            t.out.append(
                UpdateDone(round.transfer.version, round.transfer.step, sorted(round.loaded), sorted(round.left), seconds)
            )
        self._judge(round, forward=bool(round.loaded))

    def _judge(self, round: Round, forward: bool) -> None:
        """Rounds that bring nobody forward must not repeat for ever."""
        t = self._t
        t.standing = True
        self.barren = 0 if forward else self.barren + 1
        newest = t.versions.newest
        if self.barren >= MAX_BARREN and not any(node.version == newest for node in t.nodes):
            version = round.transfer.version
            why = round.reason or "no node was left"
            t.out.append(
                Fatal(
                    "weightsync",
                    f"Version {version} (step {round.transfer.step}) reached no rollout node in {self.barren} attempts: {why}.",
                )
            )
