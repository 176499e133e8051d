"""What the sender and its receivers tell each other about one transfer, besides the weights themselves.

In order: the sender's `Head`; one `Report` at stage READY per member (acknowledged, or why not); the sender's `Verdict` "go";
the buckets; one `Report` at stage RECEIVED per member, with its checksums; the sender's `Verdict` "commit". A member that fails
says so in its next report. docs/weightsync.md has the reasons.
"""

from __future__ import annotations

import enum

from segue.ports.weights import Manifest
from segue.wire import Message


class Stage(enum.StrEnum):
    """What a report is about."""

    READY = "ready"
    RECEIVED = "received"


class Fault(enum.StrEnum):
    """Why a member does not go on.

    REFUSED: the manifest does not fit its model. LOST: the group broke or was not complete in time. ABANDONED: its node gave the
    transfer up. OWN: a failure of its own (out of memory, for instance).
    """

    NONE = ""
    REFUSED = "refused"
    LOST = "lost"
    ABANDONED = "abandoned"
    OWN = "own"


class Head(Message, frozen=True):
    """What is about to be sent; `manifest` is None when the sender cannot serve the transfer, for `reason`.

    `sources` name the learner ranks that send: bucket i comes from source i mod len(sources), in that source's own group.
    """

    manifest: Manifest | None
    reason: str = ""
    sources: tuple[str, ...] = ("the sender",)


class Report(Message, frozen=True):
    """How `member`, or a source other than the first, fares.

    `holds_group`: it still has the process groups of the transfer's group id that it takes part in (READY). `checksums` are those
    of all buckets, a source's of the buckets that it sends, in order (RECEIVED: everything has arrived, or has been sent).
    """

    member: str
    stage: Stage
    fault: Fault = Fault.NONE
    sentence: str = ""
    holds_group: bool = False
    checksums: list[int] = []


class Verdict(Message, frozen=True):
    """The sender's decision for all members.

    "go": `build` tells them to build the group anew instead of using the one they hold. "commit": the checksums of all members
    equal `checksums`. Not `ok`: give up, for `reason`.
    """

    ok: bool
    reason: str = ""
    build: bool = False
    checksums: list[int] = []
