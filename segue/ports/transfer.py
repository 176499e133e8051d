"""One broadcast of one weight version: who takes part, where they meet, how it ended. Needs no torch."""

from __future__ import annotations

import msgspec

from segue.wire import Message


def members_of(node: str, ranks: int) -> list[str]:
    """A node's names in `Transfer.members`, one per engine rank that receives weights: its own if there is one, else NODE/0, …"""
    return [node] if ranks == 1 else [f"{node}/{rank}" for rank in range(ranks)]


def node_of(member: str) -> str:
    """The node that a member of a transfer belongs to."""
    return member.partition("/")[0]


class Transfer(msgspec.Struct, frozen=True):
    """One broadcast of one version: who takes part and where they meet.

    The sender has rank 0; `members[i]` has rank i + 1. The process group is keyed by `group`: members that hold the group of
    that id use it again, otherwise all build it anew, meeting at `address` under the prefix `group`. `transfer` counts attempts.
    """

    version: int
    step: int
    transfer: int
    group: int
    members: list[str]
    address: str
    deadline_seconds: float


class TransferResult(Message, frozen=True):
    """How transfer `transfer` of `version` went on the sender's side. `missing` names members that did not take part."""

    version: int
    transfer: int
    ok: bool
    missing: list[str]
    reason: str
    bytes: int
    gather_seconds: float
    transfer_seconds: float
