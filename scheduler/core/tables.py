"""What all parts of the core share: the tables, the timers, and the notes they leave for one another within one event.

A part changes the tables and appends commands; what must follow in other parts it notes here, and the core settles the notes
in one fixed order before the event is over. So no part calls back into one that called it.
"""

from __future__ import annotations

from scheduler.core.commands import Command
from scheduler.core.episodes import Episode, EpisodeTable
from scheduler.core.meter import Meter, Tally
from scheduler.core.nodes import Node, NodeTable
from scheduler.core.timers import Timers
from scheduler.core.versions import Versions
from scheduler.core.waiting import Waiting
from segue.config import Config
from segue.episode import FailureClass


class Tables:
    """Shared state. `out` collects the commands of the current event, `observations` the (metric, label, value) to export.

    Notes: `lost` are attempts that ended with their node or their deadline, `left` nodes whose session ended, `freed` nodes
    with a new free place, `unplaced` episodes that began to wait; `room` says that admission may have opened, `standing` that
    a node came, went or loaded, or that a version was published. `sharing` are nodes with a quota, `parks_ordered` parks are
    under way, `stopped` is why there is no more work. `fences` are the nodes that were fenced and have not come back, with why.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.env = config.task.env  # one suite per run: what its tasks call themselves is no label
        self.meter = Meter()
        self.tally = Tally()
        self.timers = Timers(self.meter)
        self.versions = Versions()
        self.episodes = EpisodeTable(self.meter)
        self.nodes = NodeTable(self.meter)
        self.waiting = Waiting(self.meter)
        self.out: list[Command] = []
        self.observations: list[tuple[str, str, float]] = []
        self.lost: list[tuple[Episode, FailureClass, str]] = []
        self.left: list[Node] = []
        self.freed: list[Node] = []
        self.unplaced: list[Episode] = []
        self.room = False
        self.standing = False
        self.sharing: list[Node] = []
        self.parks_ordered = 0
        self.stopped = ""
        self.fences: dict[str, str] = {}
