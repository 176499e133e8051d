"""One broadcast of an update, from its order until nobody is left who has yet to load."""

from __future__ import annotations

from scheduler.core.nodes import Node
from segue.ports.transfer import Transfer

FIGURES = (
    "updates",
    "bytes",
    "gather_seconds",
    "transfers",
    "transfer_seconds",
    "loads",
    "stage_seconds",
    "drain_seconds",
    "pause_seconds",
)
"""Totals over the rounds of a run."""


class Round:
    """One transfer: `expecting` have yet to load, `failed` could not and wait for the sender's word on why.

    In a `joining` round the members had no weights, in a `first` one nobody had. `inflight` is how requests in flight cross.
    `fenced`: some member was, because of this round.
    """

    def __init__(self, transfer: Transfer, members: list[Node], joining: bool, first: bool, inflight: str, now: float) -> None:
        self.transfer = transfer
        self.inflight = inflight
        self.members = members
        self.joining = joining
        self.first = first
        self.expecting = {node.name: node for node in members}
        self.failed: list[Node] = []
        self.loaded: list[str] = []
        self.left: set[str] = set()
        self.sent = False
        self.reason = ""
        self.fenced = False
        self.began_at = now
