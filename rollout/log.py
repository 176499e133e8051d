"""The log of one episode as the node that runs it sees it: a pure fold over deltas.

A live episode and one that goes on elsewhere take the same way: every delta, written here or read from a snapshot, goes through
`EpisodeLog.apply`. So the log after a resumption equals the log without one by construction, and what is to be done next (reset
the environment, sample, step it, finish) follows from the log alone.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from segue import wire
from segue.episode import ActionRecord, DeltaBody, EpisodeSnapshot, Outcome, TurnRecord, log_checksum
from segue.errors import WireError
from segue.ports.engine import Chunk
from segue.ports.envpool import Restore
from segue.ports.rollout import Delta, DeltaHead
from segue.trajectory import Author, TokenLog, concat, context, sampled


class Phase(enum.StrEnum):
    """What an episode needs next."""

    RESET = "reset"
    GENERATE = "generate"
    STEP = "step"
    OVER = "over"


class Budget(msgspec.Struct, frozen=True):
    """What an episode may use: turns, context tokens in all, sampled tokens per turn.

    `closing` tokens of context are held back for the harness to close a turn; an exact fit is kept.
    """

    max_turns: int
    max_tokens: int
    max_turn_tokens: int
    closing: int


class BadLog(ValueError):
    """Deltas that do not make a log: a snapshot that was damaged, or a mistake of ours."""


class EpisodeLog:
    """Everything an episode has said so far.

    tokens      the whole context, ids
    prompt      how many of them are the prompt
    turn        the turn to be sampled, stepped or recorded next (0 after the reset's record)
    action      ids sampled in that turn so far
    waiting     the text of that turn's complete action, while its record is missing
    sampled     tokens sampled in all, and `by_version`; `computed` of the context are known to have had KV
    records     what every turn did, without its snapshot
    info        the newest value of every number that the environment reported
    stop        strings that complete an action now
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.tokens: list[int] = []
        self.prompt = 0
        self.turn = -1
        self.action: list[int] = []
        self.waiting: str | None = None
        self.sampled = 0
        self.computed = 0
        self.by_version: Counter[int] = Counter()
        self.records: list[TurnRecord] = []
        self.next_seq = 0
        self.checksum = 0
        self.reward = 0.0
        self.info: dict[str, float] = {}
        self.stop: tuple[str, ...] = ()
        self.last: TurnRecord | None = None
        self._snapshot: tuple[int, bytes] | None = None
        self._replay: list[ActionRecord] = []

    @classmethod
    def restore(cls, snapshot: EpisodeSnapshot, budget: Budget) -> EpisodeLog:
        """The log that `snapshot.deltas` make. Raises `BadLog`."""
        log = cls(budget)
        for payload in snapshot.deltas:
            try:
                body = wire.decode(payload, DeltaBody)
            except WireError as error:
                raise BadLog(f"delta {log.next_seq} does not decode: {error}") from error
            log.apply(body, payload)
        if log.next_seq != snapshot.next_seq:
            raise BadLog(f"a snapshot of {log.next_seq} deltas says that delta {snapshot.next_seq} comes next")
        return log

    # --- what comes next ------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        if self.last is None:
            return Phase.RESET
        if self.waiting is not None:
            return Phase.STEP
        return Phase.OVER if self.outcome is not None else Phase.GENERATE

    @property
    def outcome(self) -> Outcome | None:
        """How the episode ended, as far as the log decides it; None while it goes on (or a turn is under way)."""
        last = self.last
        if last is None or self.action or self.waiting is not None:
            return None
        if last.terminated:
            return Outcome.TERMINATED
        if last.truncated:
            return Outcome.TRUNCATED_ENV
        if self.turn >= self._budget.max_turns:
            return Outcome.TRUNCATED_TURNS
        return Outcome.TRUNCATED_TOKENS if self.room < 1 else None

    @property
    def newest_version(self) -> int:
        """The newest version that sampled any of it; −1 if none did."""
        return max(self.by_version, default=-1)

    @property
    def room(self) -> int:
        """Tokens that still fit into the context, closing tokens held back."""
        return self._budget.max_tokens - self._budget.closing - len(self.tokens)

    @property
    def allowance(self) -> int:
        """Tokens that may still be sampled in this turn: what was sampled before an interruption counts."""
        return min(self._budget.max_turn_tokens - len(self.action), self.room)

    def environment(self) -> Restore | None:
        """How to rebuild the environment as it was after the last record; None: by a plain reset."""
        if self.last is None:
            return None
        turn, snapshot = self._snapshot if self._snapshot is not None else (-1, None)
        return Restore(snapshot, turn, list(self._replay))

    # --- growing --------------------------------------------------------------------------------------------------

    def apply(self, body: DeltaBody, payload: bytes) -> list[tuple[int, int]]:
        """Append one delta. Returns how many sampled tokens of which version it has.

        Raises `BadLog` if it does not follow from what is there; then nothing has changed.
        """
        try:
            body.log.validate()
        except ValueError as error:
            raise BadLog(f"delta {self.next_seq}: {error}") from error
        return self._append(body, payload)

    def _append(self, body: DeltaBody, payload: bytes) -> list[tuple[int, int]]:
        """The same for a body whose values are known to be valid."""
        log, record = body.log, body.record
        self._check_order(body)
        tokens = log.tokens.tolist()
        fresh: list[tuple[int, int]] = []
        if record is None:  # nobody samples what a record brings
            where = log.mask.nonzero()[0]
            if len(where):
                fresh = log.sampled_by_version()
                self.action.extend(tokens if len(where) == len(tokens) else log.tokens[where].tolist())
                self.sampled += len(where)
                self.computed = len(self.tokens) + int(where[-1])
                for version, count in fresh:
                    self.by_version[version] += count
        self.tokens.extend(tokens)
        if body.action_complete:
            self.waiting = body.action
        if record is not None:
            self._record(record)
        self.next_seq += 1
        self.checksum = log_checksum([payload], self.checksum)
        return fresh

    def write(self, body: DeltaBody, episode: int, attempt: int) -> Delta:
        """Apply a new delta and return what the scheduler gets. Its tokens come from a `Piece`, which has checked what the engine
        gave, or from `context`: their values are not checked again."""
        payload = wire.encode(body)
        record = body.record
        turn, seq = self.turn, self.next_seq
        try:
            body.log.check_lengths()
        except ValueError as error:
            raise BadLog(f"delta {seq}: {error}") from error
        fresh = self._append(body, payload)
        head = DeltaHead(
            episode=episode,
            attempt=attempt,
            seq=seq,
            turn=turn if record is None else record.turn,
            sampled=tuple(fresh),
            record=record is not None,
            pending_action=body.action_complete,
            reward=record.reward if record is not None else 0.0,
        )
        return Delta(head, payload)

    def _check_order(self, body: DeltaBody) -> None:
        record = body.record
        if record is not None:
            if record.turn != self.turn:
                raise BadLog(f"delta {self.next_seq}: a record of turn {record.turn} where turn {self.turn} is due")
            if self.turn >= 0 and self.waiting is None:
                raise BadLog(f"delta {self.next_seq}: a record of turn {record.turn} before its action is complete")
        elif self.last is None:
            raise BadLog(f"delta {self.next_seq}: an action before the reset's record")
        elif self.waiting is not None:
            raise BadLog(f"delta {self.next_seq}: more of an action that is complete")
        for segment in body.log.segments:
            if segment.turn != self.turn:
                raise BadLog(f"delta {self.next_seq}: tokens of turn {segment.turn} where turn {self.turn} is due")
            if (segment.author == Author.ASSISTANT) != (record is None):
                raise BadLog(f"delta {self.next_seq}: tokens by {Author(segment.author).name} out of place")

    def _record(self, record: TurnRecord) -> None:
        if record.turn < 0:
            self.prompt = len(self.tokens)
        else:
            self._replay.append(ActionRecord(record.action, record.observation_hash))
        if record.snapshot is not None:
            self._snapshot = (record.turn, record.snapshot)
            self._replay.clear()
        self.records.append(msgspec.structs.replace(record, snapshot=None))
        self.reward += record.reward
        self.info.update(record.info)
        self.stop = tuple(record.stop) or self.stop
        self.last = record
        self.turn = record.turn + 1
        self.action = []
        self.waiting = None


class Piece:
    """What the policy has sampled in the turn under way and no delta holds yet."""

    def __init__(self, turn: int) -> None:
        self._turn = turn
        self._parts: list[TokenLog] = []
        self.tokens: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, chunk: Chunk, keep: int | None = None) -> None:
        """Add a chunk's tokens (the first `keep` of them). Raises `BadLog` if its parts disagree: values are never imputed."""
        stamped = sum(n for _, n in chunk.spans)
        if not stamped == len(chunk.tokens) == len(chunk.logprobs):
            raise BadLog(
                f"the engine gave {len(chunk.tokens)} tokens with {len(chunk.logprobs)} log-probabilities and "
                f"versions for {stamped}"
            )
        n = len(chunk.tokens) if keep is None else keep
        if n == 0:
            return
        tokens, logprobs = chunk.tokens, chunk.logprobs
        if n < len(tokens):
            tokens, logprobs = tokens[:n], logprobs[:n]
        if len(chunk.spans) == 1:
            versions = np.full(n, chunk.spans[0][0], dtype=np.int32)
        else:
            versions = np.repeat([version for version, _ in chunk.spans], [run for _, run in chunk.spans])[:n]
        part = sampled(tokens, logprobs, versions, np.full(n, chunk.kv_version, dtype=np.int32), self._turn)
        try:
            if chunk.kv_version < 0 or min(chunk.spans)[0] < 0:
                raise ValueError("a sampled token has no weight version")
            part.check_sampled()
        except ValueError as error:
            raise BadLog(f"the engine's output is not valid: {error}") from error
        self._parts.append(part)
        self.tokens.extend(tokens)

    def flush(self) -> DeltaBody:
        """A delta of everything so far: part of an action."""
        return DeltaBody(self._drain())

    def complete(self, closing: Sequence[int], text: str) -> DeltaBody:
        """The last delta of an action, with the closing tokens that the harness appends."""
        log = self._drain()
        if closing:
            log = concat([log, context(list(closing), Author.ASSISTANT, self._turn)])
        return DeltaBody(log, action_complete=True, action=text)

    def _drain(self) -> TokenLog:
        parts, self._parts = self._parts, []
        self.tokens = []
        return concat(parts) if parts else context([], Author.ASSISTANT, self._turn)
