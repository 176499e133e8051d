"""What rollout nodes say to the scheduler, and what it says to them.

Upwards, a node sends numbered *exchanges*, one at a time; each carries every event since the last one and renews the node's
leases. An exchange that was lost is sent again unchanged (same number), so that the scheduler answers a repetition with the
stored reply. Downwards, the scheduler pushes numbered *orders* in batches, one batch at a time per node, sent again until
acknowledged. Both sides drop what belongs to another `session` (one life of one node process).
"""

from __future__ import annotations

import msgspec

from segue.episode import EpisodeSnapshot, Task
from segue.ports.rpc import Rpc
from segue.ports.transfer import Transfer
from segue.wire import Message

# --- events: node → scheduler ---------------------------------------------------------------------------------------


class DeltaHead(msgspec.Struct, frozen=True, gc=False):
    """The typed envelope of a delta: what the scheduler reads. The payload beside it stays opaque (an encoded DeltaBody).

    `sampled` is `[(version, number of tokens)]`. `record` is True for part (b) of a turn (turn -1: the reset), and then
    `reward` is that turn's. `pending_action` is True when part (a) of `turn` is complete and its (b) has yet to come.
    """

    episode: int
    attempt: int
    seq: int
    turn: int
    sampled: tuple[tuple[int, int], ...]
    record: bool = False
    pending_action: bool = False
    reward: float = 0.0


class Delta(msgspec.Struct, frozen=True, tag=True):
    """One addition to an episode's log."""

    head: DeltaHead
    payload: bytes


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The episode ended (terminated or truncated). Totals and checksum cover all attempts' accepted deltas."""

    episode: int
    attempt: int
    next_seq: int
    outcome: str
    turns: int
    reward: float
    checksum: int
    seconds: float
    info: dict[str, float] = {}


class Fail(msgspec.Struct, frozen=True, tag=True):
    """This attempt failed (`failure`: infra, env or data). The scheduler decides whether there is another attempt.

    `reason` is of a closed set; `detail` says it to the user, in half a sentence.
    """

    episode: int
    attempt: int
    failure: str
    reason: str
    detail: str = ""


class Parked(msgspec.Struct, frozen=True, tag=True):
    """The node let go of the episode as ordered: deltas flushed, environment saved and closed, nothing held."""

    episode: int
    attempt: int
    next_seq: int
    seconds: float


class Discarded(msgspec.Struct, frozen=True, tag=True):
    """The node stopped an attempt because it was told to drop it (or never knew it)."""

    episode: int
    attempt: int


class SliceUsed(msgspec.Struct, frozen=True, tag=True):
    """The lease's token slice is used up; the episode goes on until the scheduler parks or extends it."""

    episode: int
    attempt: int


class Paused(msgspec.Struct, frozen=True, tag=True):
    """A request ended before its turn did. `reason`: update, slice or migration."""

    episode: int
    attempt: int
    reason: str


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """A request that had ended before its turn did went on."""

    episode: int
    attempt: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The node's engine now runs `version`. Seconds: pause from engine idle to the first step possible, drain before it."""

    update: int
    version: int
    stage_seconds: float
    drain_seconds: float
    pause_seconds: float


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The node could not load; it still runs what it ran before, or says in `fatal` that it runs nothing usable."""

    update: int
    version: int
    reason: str
    fatal: bool


NodeEvent = Delta | Finish | Fail | Parked | Discarded | SliceUsed | Paused | Resumed | Loaded | LoadFailed


class NodeInfo(msgspec.Struct, frozen=True):
    """What a node declares when it joins. `slots` are engine slots, `max_episodes` loops (waiting ones included)."""

    max_episodes: int
    slots: int
    host: str = "127.0.0.1"


class Exchange(Message, frozen=True):
    """Everything a node has to say since its last exchange. `info` is set in the first one of a session (it joins).

    `counts` are those of the node's totals that have changed since its last exchange; in the first one of a session, all.
    """

    node: str
    session: int
    number: int
    events: list[NodeEvent]
    orders_seen: int
    info: NodeInfo | None = None
    counts: dict[str, float] = {}


class ExchangeReply(Message, frozen=True):
    """`refused` lists (episode, attempt) that are stale: stop and discard. `resend` lists (episode, attempt, seq) gaps.

    `fenced` means the whole session is over: stop everything, discard, and join again under a new session.
    """

    number: int
    refused: list[tuple[int, int]]
    resend: list[tuple[int, int, int]]
    flush_after: float
    lease_seconds: float
    fenced: bool = False


# --- orders: scheduler → node ---------------------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True):
    """How to sample. `temperature` 0 is greedy; then log-probabilities are those of temperature 1."""

    temperature: float = 1.0
    seed: int = 0


class Lease(msgspec.Struct, frozen=True, tag=True):
    """The right to run one attempt of an episode. Lower `priority` runs first (the age of its group)."""

    episode: int
    attempt: int
    group: int
    member: int
    purpose: str
    priority: int
    task: Task
    sampling: Sampling
    snapshot: EpisodeSnapshot
    slice_tokens: int = 0


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Stop an attempt and discard it."""

    episode: int
    attempt: int
    reason: str


class ParkOrder(msgspec.Struct, frozen=True, tag=True):
    """Flush, save and let go of an episode (answered by `Parked`)."""

    episode: int
    attempt: int


class Extend(msgspec.Struct, frozen=True, tag=True):
    """Another `slice_tokens` for an episode whose slice was used up."""

    episode: int
    attempt: int
    slice_tokens: int


class BeginUpdate(msgspec.Struct, frozen=True, tag=True):
    """Take part in `transfer`, then load it the way `inflight` says, then report `Loaded`, all within the deadline.

    `inflight`: recompute, keep, turn or episode (design.md §5). `drain_seconds` bounds how long turn and episode wait
    before what is left is interrupted as under recompute.
    """

    update: int
    transfer: Transfer
    inflight: str
    drain_seconds: float
    deadline_seconds: float


class AbandonUpdate(msgspec.Struct, frozen=True, tag=True):
    """Give up update `update`: discard what was staged, go on with the weights you have."""

    update: int
    reason: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Stop all work; the process is about to be ended."""

    reason: str


Order = Lease | Drop | ParkOrder | Extend | BeginUpdate | AbandonUpdate | Stop


class Orders(Message, frozen=True):
    """Orders number `first`, `first + 1`, … for one session of a node."""

    node: str
    session: int
    first: int
    orders: list[Order]


class OrdersSeen(Message, frozen=True):
    """All orders below `upto` have arrived. `session` differs when the node has since been born again."""

    session: int
    upto: int


EXCHANGE = Rpc("exchange", Exchange, ExchangeReply)
ORDERS = Rpc("orders", Orders, OrdersSeen)
