"""Partial rollouts: an episode that used up its lease's slice of tokens makes room if somebody more urgent waits.

Urgent is who belongs to an older group, or to one that is nearly finished (whose rank is lowered, see `groups`). A parked
episode holds nothing on a GPU and waits for a lease like any other, at its group's rank.
"""

from __future__ import annotations

from scheduler.core.commands import ExtendSlice, ParkAttempt
from scheduler.core.episodes import Episode
from scheduler.core.leases import Leases
from scheduler.core.tables import Tables
from segue.episode import State


class Parking:
    """Decides between another slice and a park. Each park under way makes room for one waiting episode."""

    def __init__(self, tables: Tables, leases: Leases) -> None:
        self._t = tables
        self._leases = leases

    def slice_used(self, episode: Episode, newest_group: int) -> None:
        """Park it, or let it go on."""
        t = self._t
        node = episode.node
        assert node is not None
        if episode.parking:
            return
        if t.waiting.count > t.parks_ordered:
            next_one = self._leases.choose(node, may_open=False, newest_group=newest_group)
            if next_one is not None and next_one.group.rank < episode.group.rank:
                episode.parking = True
                t.parks_ordered += 1
                t.tally.count("park_orders")
                t.out.append(ParkAttempt(node.name, node.session, episode.id, episode.attempt))
                return
        t.tally.count("slices_extended")
        t.out.append(ExtendSlice(node.name, node.session, episode.id, episode.attempt))

    def parked(self, episode: Episode, seconds: float) -> None:
        """The node let go of it."""
        t = self._t
        self._leases.release(episode)
        episode.seconds = seconds
        episode.left = "parked"
        t.tally.count("parked")
        t.episodes.move(episode, State.PARKED)
        t.waiting.push(episode)
        t.unplaced.append(episode)
