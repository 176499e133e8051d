"""What the learner and the scheduler say to each other: batches, steps, published versions."""

from __future__ import annotations

import msgspec

from segue.ports.rpc import Done, Rpc
from segue.ports.transfer import Transfer, TransferResult
from segue.wire import Message


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


class SendWeights(Message, frozen=True):
    """Start `transfer` (rank 0 of the learner); the outcome comes back as a `TransferResult` call."""

    transfer: Transfer


TAKE_BATCH = Rpc("take_batch", TakeBatch, BatchReply)
TRAINED = Rpc("trained", TrainedReport, TrainedReply)
PUBLISH = Rpc("publish", Publish, PublishReply)
COMMITTED = Rpc("committed", Committed, Done)
TRANSFER_RESULT = Rpc("transfer_result", TransferResult, Done)
SEND_WEIGHTS = Rpc("send_weights", SendWeights, Done)
