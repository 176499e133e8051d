"""Leases: which node runs which episode, and when that right ends.

Every episode has a home, the node that holds the KV of its prefix: the one it ran on last, or, before it has begun, its group's
first node (their common prompt is cached there). Routing, when an episode is to be leased: to its home, unless that is fuller
than the least loaded node by more than `scheduler.affinity_slack`; then to the least loaded.
When a place becomes free on a full cluster: the oldest waiting group first; but an episode whose home is another node is passed
over for one that is at home here, or for a new group, as long as that lets it fall behind by less than one batch of groups.
With `scheduler.affinity = false` nobody has a home.
"""

from __future__ import annotations

from scheduler.core.commands import DropAttempt, Fence, Grant
from scheduler.core.episodes import Episode
from scheduler.core.nodes import Node
from scheduler.core.tables import Tables
from segue.config import Config
from segue.episode import FailureClass, Purpose, State

PROGRESS, LEASE = "progress", "lease"
LEASED, PENDING = State.LEASED, State.PENDING


def progress_seconds(config: Config) -> float:
    """How long a leased episode may say nothing at all. The node's own budgets end it much earlier; this is for the case that
    the node lost it: its wall budget, one update, and every environment deadline on the way."""
    pool = config.envpool
    env = pool.create_seconds + pool.reset_seconds + pool.step_seconds + pool.close_seconds
    return config.rollout.wall_seconds + config.update.deadline_seconds + env + 2 * config.scheduler.lease_seconds


class Leases:
    """Grants and ends leases, and ends the sessions of nodes."""

    def __init__(self, tables: Tables) -> None:
        self._t = tables
        self._lease_seconds = tables.config.scheduler.lease_seconds
        self._progress_seconds = progress_seconds(tables.config)
        self._slack = tables.config.batch.groups
        self._affinity = tables.config.scheduler.affinity
        self._balance = tables.config.scheduler.affinity_slack

    # --- sessions -------------------------------------------------------------------------------------------------------

    def join(self, name: str, session: int, max_episodes: int, now: float) -> None:
        """A new session; an older one of that name ends."""
        t = self._t
        old = t.nodes.by_name.get(name)
        if old is not None:
            if old.session >= session:
                t.tally.count("refused", "stale_session")
                return
            self.fence(old, "replaced", now)
        node = Node(name, session, max_episodes, now)
        t.nodes.add(node)
        t.fences.pop(name, None)
        t.tally.count("joined")
        t.standing = True
        t.timers.arm(LEASE, name, now + self._lease_seconds)

    def heard(self, node: Node, now: float) -> None:
        """An exchange renews all leases of the node; its timer is moved when it fires."""
        node.heard_at = now

    def expire(self, name: str, now: float) -> None:
        """The lease timer of a node fired."""
        node = self._t.nodes.by_name.get(name)
        if node is None:
            return
        end = node.heard_at + self._lease_seconds
        if end > now:
            self._t.timers.arm(LEASE, name, end)
        else:
            self._t.tally.count("lease_expiries", by=len(node.leased))
            self.fence(node, "silent", now)

    def fence(self, node: Node, reason: str, now: float) -> None:
        """End the session: its attempts are lost, and nothing it says counts any more."""
        t = self._t
        assert node.alive
        node.mates.clear()
        t.nodes.remove(node)
        t.timers.disarm(LEASE, node.name)
        t.tally.count("fenced", reason)
        t.fences[node.name] = reason
        t.out.append(Fence(node.name, node.session, reason))
        why = "fenced" if reason in ("update_deadline", "load_failed") else "node_lost"
        t.lost.extend((episode, FailureClass.INFRA, why) for episode in node.leased.values())
        t.left.append(node)
        t.standing = True

    # --- leases ---------------------------------------------------------------------------------------------------------

    def grant(self, episode: Episode, node: Node, now: float) -> None:
        """The next attempt runs on this node."""
        t = self._t
        group = episode.group
        assert node.serving and node.has_room and node.version >= episode.floor
        t.waiting.remove(episode)
        episode.attempt += 1
        episode.node = node
        episode.leased_at = episode.progress_at = now
        episode.lease_seq = episode.next_seq
        if episode.next_seq and episode.home is not node:
            t.tally.count("migrated", episode.left)
        if group.home is None or not group.home.alive:
            group.home = node
        episode.home = node
        node.leased[episode.id] = episode
        t.meter.operations += 1
        t.episodes.move(episode, LEASED)
        t.nodes.leased(node)
        t.timers.arm(PROGRESS, episode.id, now + self._progress_seconds)
        t.out.append(
            Grant(
                node=node.name,
                session=node.session,
                episode=episode.id,
                attempt=episode.attempt,
                group=group.id,
                member=episode.member,
                purpose=group.purpose.value,
                priority=group.rank,
                task=group.task,
                temperature=group.temperature,
                turn=episode.turn,
                next_seq=episode.next_seq,
                seconds=episode.seconds,
            )
        )

    def release(self, episode: Episode) -> None:
        """The lease is over and its place is free."""
        t = self._t
        node = episode.node
        assert node is not None
        episode.node = None
        del node.leased[episode.id]
        t.meter.operations += 1
        t.timers.disarm(PROGRESS, episode.id)
        if episode.parking:
            episode.parking = False
            t.parks_ordered -= 1
        if node.alive:
            self.offer(node)

    def offer(self, node: Node) -> None:
        """The node has, or may have, a free place: it is given away before the event is over."""
        t = self._t
        t.nodes.touch(node)
        if not node.freed:
            node.freed = True
            t.freed.append(node)

    def withdraw(self, episode: Episode, reason: str) -> None:
        """End the lease from this side: the node is told to stop the attempt."""
        node = episode.node
        assert node is not None
        if node.alive:
            self._t.out.append(DropAttempt(node.name, node.session, episode.id, episode.attempt, reason))
        self.release(episode)

    def stalled(self, episode_id: int, now: float) -> None:
        """The progress timer of a lease fired."""
        t = self._t
        episode = t.episodes.live.get(episode_id)
        if episode is None or episode.state is not LEASED:
            return
        end = episode.progress_at + self._progress_seconds
        if end > now:
            t.timers.arm(PROGRESS, episode_id, end)
            return
        node = episode.node
        assert node is not None
        t.out.append(DropAttempt(node.name, node.session, episode.id, episode.attempt, "no_progress"))
        t.lost.append((episode, FailureClass.INFRA, "no_progress"))

    # --- routing --------------------------------------------------------------------------------------------------------

    def place(self, episode: Episode, now: float) -> bool:
        """Lease it now if a node has room; otherwise it waits."""
        t = self._t
        floor = episode.floor
        least = t.nodes.least_loaded(floor)
        if least is None:
            if not episode.stamp:
                t.waiting.push(episode)
            return False
        home = self._home(episode)
        if home is not None and home.serving and home.has_room and home.version >= floor and self._near(home, least):
            least = home
        self.grant(episode, least, now)
        return True

    def choose(self, node: Node, may_open: bool, newest_group: int) -> Episode | None:
        """Who should have the free place on this node; None if nobody waits for it, or a new group should rather begin."""
        t = self._t
        top = t.waiting.best(node.version)
        if top is None or top.group.purpose is not Purpose.TRAIN:
            return top
        home = self._home(top)
        if home is None or home is node or not home.serving or home.version < top.floor or not self._near(home, node):
            return top
        mate = t.waiting.best_mate(node)
        if mate is not None and mate.group.rank - top.group.rank < self._slack:
            return mate
        if may_open and newest_group - top.group.id < self._slack:
            return None
        return top

    def _home(self, episode: Episode) -> Node | None:
        return episode.prefix_home if self._affinity else None

    def _near(self, home: Node, other: Node) -> bool:
        """Whether `home` is not so much fuller than `other` that affinity yields."""
        return home.load - other.load <= self._balance
