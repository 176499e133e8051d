"""What rollout nodes, the learner and the driver say to the scheduler, and what it says to the nodes.

Upwards, a node sends numbered *exchanges*, one at a time; each carries every event since the last one and renews the node's
leases. An exchange that was lost is sent again unchanged (same number), so that the scheduler answers a repetition with the
stored reply. Downwards, the scheduler pushes numbered *orders* in batches, one batch at a time per node, sent again until
acknowledged. Both sides drop what belongs to another `session` (one life of one node process).
"""

from __future__ import annotations

from typing import Any

import msgspec

from segue.episode import EpisodeSnapshot, Task
from segue.ports.rpc import Done, Rpc
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


# --- learner → scheduler --------------------------------------------------------------------------------------------


class MemberPayload(msgspec.Struct, frozen=True):
    """One trajectory of a batch: its accepted delta payloads in order, and how it ended."""

    episode: int
    member: int
    outcome: str
    reward: float
    deltas: list[bytes]
    seconds: float
    info: dict[str, float] = {}


class GroupPayload(msgspec.Struct, frozen=True):
    """One group of a batch. `members` holds those that finished, at least `group.min_valid` of them with an outcome that is not
    in `learner.mask_outcomes`; `size` is how many were meant to be."""

    group: int
    task: str
    size: int
    temperature: float
    members: list[MemberPayload]


class Batch(Message, frozen=True):
    """A batch formed for target step `step`. `version_steps` maps every version in it to its step."""

    step: int
    groups: list[GroupPayload]
    version_steps: dict[int, int]


class TakeBatch(Message, frozen=True):
    """Ask for the batch of `step`; every learner rank asks for itself and gets the same. Waits at most `wait` seconds."""

    step: int
    rank: int
    wait: float


class BatchReply(Message, frozen=True):
    """`batch` is None when none was ready in time (ask again), `stop` tells that there will be none.

    `opened` is False as long as training has not been opened (an evaluation comes first, and has a deadline of its own).
    """

    batch: Batch | None
    stop: str = ""
    opened: bool = True


class TrainedReport(Message, frozen=True):
    """Step `step` is trained: acknowledged after the last optimizer step of its batch. `cut`: a checkpoint follows."""

    step: int
    stats: dict[str, float]
    ages: list[int]
    cut: bool


class TrainedReply(Message, frozen=True):
    """`cut` is the scheduler's state at this acknowledgement, to be stored in the checkpoint as it is."""

    cut: bytes | None


class Publish(Message, frozen=True):
    """Weights of `step` are gathered and ready to send. Their manifest goes to the members with the transfer."""

    step: int
    address: str


class PublishReply(Message, frozen=True):
    """The id given to these weights."""

    version: int


class Committed(Message, frozen=True):
    """All steps below `step` are inside a complete checkpoint."""

    step: int


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


# --- scheduler → learner --------------------------------------------------------------------------------------------


class SendWeights(Message, frozen=True):
    """Start `transfer` (rank 0 of the learner); the outcome comes back as a `TransferResult` call."""

    transfer: Transfer


# --- driver → scheduler ---------------------------------------------------------------------------------------------


class OpenTraining(Message, frozen=True):
    """Open admission for `steps` steps in all."""

    steps: int


class StartEval(Message, frozen=True):
    """Run one episode of each of `tasks` under `name`, at `temperature` (0 = greedy), on the newest loaded weights."""

    name: str
    tasks: list[Task]
    temperature: float


class EvalState(Message, frozen=True):
    """How far evaluation `name` has come. `rewards`/`success` have one entry per finished episode."""

    name: str


class EvalStateReply(Message, frozen=True):
    """Counts of one evaluation; `done` once finished + failed = n.

    `example` says why the last one failed, `users` whether by its environment or its task's data: the user's to mend; `raised`
    whether the user's code raised, so that the env pool's log has a traceback.
    """

    n: int
    finished: int
    failed: int
    success: list[float]
    rewards: list[float]
    done: bool
    example: str = ""
    users: bool = False
    raised: bool = False


class WatchEvents(Message, frozen=True):
    """Run events after number `after`; waits at most `wait` seconds for the first."""

    after: int
    wait: float


class RunEvent(msgspec.Struct, frozen=True):
    """Something the driver prints or acts on: step, update, eval, warning, fatal. `data` is plain JSON-like."""

    number: int
    what: str
    data: dict[str, Any]


class EventsReply(Message, frozen=True):
    """Events in order; empty when none came in time."""

    events: list[RunEvent]


class GetStatus(Message, frozen=True):
    """Ask for the scheduler's counts."""


class Status(Message, frozen=True):
    """The scheduler's counts, plain JSON-like (`scheduler.report`)."""

    data: dict[str, Any]


class StopRun(Message, frozen=True):
    """Close admission, tell the nodes to stop, release every waiter with `reason`."""

    reason: str


EXCHANGE = Rpc("exchange", Exchange, ExchangeReply)
ORDERS = Rpc("orders", Orders, OrdersSeen)
TAKE_BATCH = Rpc("take_batch", TakeBatch, BatchReply)
TRAINED = Rpc("trained", TrainedReport, TrainedReply)
PUBLISH = Rpc("publish", Publish, PublishReply)
COMMITTED = Rpc("committed", Committed, Done)
TRANSFER_RESULT = Rpc("transfer_result", TransferResult, Done)
SEND_WEIGHTS = Rpc("send_weights", SendWeights, Done)
OPEN_TRAINING = Rpc("open_training", OpenTraining, Done)
START_EVAL = Rpc("start_eval", StartEval, Done)
EVAL_STATE = Rpc("eval_state", EvalState, EvalStateReply)
WATCH_EVENTS = Rpc("watch_events", WatchEvents, EventsReply)
GET_STATUS = Rpc("get_status", GetStatus, Status)
NODE_STATUS = Rpc("node_status", GetStatus, Status)
STOP_RUN = Rpc("stop_run", StopRun, Done)
