"""A trajectory: token ids end to end, and for every sampled token who sampled it, how likely, and under which weights."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from segue.wire import Message

NO_VERSION = -1
Array = np.ndarray[Any, Any]


class Author(enum.IntEnum):
    """Who wrote a segment. Only ASSISTANT segments can hold sampled tokens; a harness may force some of theirs."""

    SYSTEM = 0
    USER = 1
    ASSISTANT = 2
    OBSERVATION = 3


_AUTHORS = frozenset(int(author) for author in Author)


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A run of `length` tokens by one author within one turn. Turn -1 is the prompt."""

    author: int
    turn: int
    length: int


class TokenLog(msgspec.Struct, frozen=True):
    """Tokens with everything recorded about each; all arrays have shape [T] and index t describes token t itself.

    tokens       int32    ids, never re-tokenised
    mask         uint8    1 if the policy sampled the token (it carries loss), else 0
    logprobs     float32  log-probability of the sampled token as sampled, in nats, temperature included; 0 where mask is 0
    versions     int32    weight version in the engine when the token was sampled; NO_VERSION where mask is 0
    kv_versions  int32    version of the KV lineage the token was sampled on; equals `versions` unless KV was kept
    """

    tokens: np.ndarray[Any, Any]
    mask: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]
    versions: np.ndarray[Any, Any]
    kv_versions: np.ndarray[Any, Any]
    segments: list[Segment]

    def __len__(self) -> int:
        return len(self.tokens)

    def check_lengths(self) -> None:
        """Raises ValueError: an array is of the wrong kind, or its length is not that of the others and of the segments."""
        n = len(self.tokens)
        shape = (n,)
        for name, array, kind in (
            ("tokens", self.tokens, "i"),
            ("mask", self.mask, "u"),
            ("logprobs", self.logprobs, "f"),
            ("versions", self.versions, "i"),
            ("kv_versions", self.kv_versions, "i"),
        ):
            if array.shape == shape and array.dtype.kind == kind:
                continue
            if array.ndim != 1 or array.dtype.kind != kind:
                raise ValueError(f"{name} is a {array.ndim}-dimensional array of {array.dtype}")
            raise ValueError(f"{name} has {len(array)} entries for {n} tokens")
        covered = 0
        for segment in self.segments:
            if segment.length < 1 or segment.author not in _AUTHORS:
                raise ValueError("a segment is empty or by nobody")
            covered += segment.length
        if covered != n:
            raise ValueError(f"segments cover {covered} of {n} tokens")

    def validate(self) -> None:
        """Raises ValueError: what `check_lengths` finds, a sampled token without log-probability or version, a forced one that
        has them, a negative id."""
        self.check_lengths()
        n = len(self.tokens)
        if np.count_nonzero(self.tokens < 0):
            raise ValueError("a token id is negative")
        sampled = self.mask == 1
        count = int(np.count_nonzero(sampled))
        if np.count_nonzero(self.mask) != count:
            raise ValueError("mask has values other than 0 and 1")
        if np.count_nonzero(np.isfinite(self.logprobs)) != n or np.count_nonzero(_where(sampled, count, self.logprobs) > 1e-4):
            raise ValueError("a sampled token has no valid log-probability")
        for versions in (self.versions, self.kv_versions):
            if np.count_nonzero(_where(sampled, count, versions) < 0):
                raise ValueError("a sampled token has no weight version")
        if count == n:
            self._check_authors(sampled)
            return
        forced = ~sampled
        for array, nothing in ((self.versions, NO_VERSION), (self.kv_versions, NO_VERSION), (self.logprobs, 0)):
            if np.count_nonzero(_where(forced, n - count, array) != nothing):
                raise ValueError("a token that was not sampled carries a version or a log-probability")
        if count:
            self._check_authors(sampled)

    def check_sampled(self) -> None:
        """As `validate`, for a log whose tokens were all sampled, by versions that are known to be valid."""
        self.check_lengths()
        if np.count_nonzero(self.tokens < 0):
            raise ValueError("a token id is negative")
        logprobs = self.logprobs
        if np.count_nonzero(np.isfinite(logprobs)) != len(logprobs) or np.count_nonzero(logprobs > 1e-4):
            raise ValueError("a sampled token has no valid log-probability")

    def _check_authors(self, sampled: np.ndarray[Any, Any]) -> None:
        start = 0
        for segment in self.segments:
            if segment.author != Author.ASSISTANT and np.count_nonzero(sampled[start : start + segment.length]):
                raise ValueError(f"sampled tokens in a segment by {Author(segment.author).name}")
            start += segment.length

    def sampled_by_version(self) -> list[tuple[int, int]]:
        """`[(version, number of sampled tokens)]`, ascending."""
        n = int(np.count_nonzero(self.mask))
        versions = self.versions if n == len(self.mask) else self.versions[self.mask == 1]
        if n and np.count_nonzero(versions == versions[0]) == n:  # nearly always: spares the sorting
            return [(int(versions[0]), n)]
        found, counts = np.unique(versions, return_counts=True)
        return [(int(v), int(n)) for v, n in zip(found, counts, strict=True)]


def _where(chosen: np.ndarray[Any, Any], count: int, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The `count` values of `array` that are chosen; no copy where all are."""
    return array if count == len(array) else array[chosen]


def context(tokens: list[int], author: Author, turn: int) -> TokenLog:
    """Tokens that nobody sampled: prompt, observations, and what the harness forces into an assistant turn."""
    n = len(tokens)
    return TokenLog(
        tokens=np.asarray(tokens, dtype=np.int32),
        mask=np.zeros(n, dtype=np.uint8),
        logprobs=np.zeros(n, dtype=np.float32),
        versions=np.full(n, NO_VERSION, dtype=np.int32),
        kv_versions=np.full(n, NO_VERSION, dtype=np.int32),
        segments=[Segment(int(author), turn, n)] if n else [],
    )


def sampled(
    tokens: list[int], logprobs: list[float], versions: Sequence[int] | Array, kv_versions: Sequence[int] | Array, turn: int
) -> TokenLog:
    """Tokens that the policy sampled in one turn; all four have one entry per token."""
    n = len(tokens)
    return TokenLog(
        tokens=np.asarray(tokens, dtype=np.int32),
        mask=np.ones(n, dtype=np.uint8),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        versions=np.asarray(versions, dtype=np.int32),
        kv_versions=np.asarray(kv_versions, dtype=np.int32),
        segments=[Segment(int(Author.ASSISTANT), turn, n)] if n else [],
    )


def concat(parts: Iterable[TokenLog]) -> TokenLog:
    """One log out of parts, in order; neighbouring segments of one author and turn become one.

    The one place where per-token arrays are joined (faults.md F26): every field goes through the same concatenation.
    """
    parts = list(parts)
    if not parts:
        return context([], Author.USER, -1)
    filled = [part for part in parts if len(part)]
    if len(filled) == 1 and len(filled[0].segments) == 1:
        return filled[0]
    segments: list[Segment] = []
    for part in parts:
        for segment in part.segments:
            if segments and (segments[-1].author, segments[-1].turn) == (segment.author, segment.turn):
                segments[-1] = Segment(segment.author, segment.turn, segments[-1].length + segment.length)
            else:
                segments.append(segment)
    return TokenLog(
        tokens=np.concatenate([p.tokens for p in parts]),
        mask=np.concatenate([p.mask for p in parts]),
        logprobs=np.concatenate([p.logprobs for p in parts]),
        versions=np.concatenate([p.versions for p in parts]),
        kv_versions=np.concatenate([p.kv_versions for p in parts]),
        segments=segments,
    )


class Trajectory(Message, frozen=True):
    """A finished episode as the learner sees it: the concatenation of its accepted deltas, and how it ended."""

    episode: int
    group: int
    member: int
    task: str
    purpose: str
    log: TokenLog
    turn_rewards: list[float]
    outcome: str
    temperature: float
    info: dict[str, float]

    @property
    def reward(self) -> float:
        """Episode return: the sum of the turn rewards."""
        return float(sum(self.turn_rewards))
