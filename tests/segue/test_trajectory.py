"""Per-token arrays stay together: joined at one place, checked in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue import wire
from segue.episode import DeltaBody
from segue.trajectory import NO_VERSION, Author, Segment, TokenLog, Trajectory, concat, context, sampled


@dataclass(frozen=True)
class Token:
    """One token of a made-up episode, as the slow reference sees it."""

    id: int
    author: Author
    turn: int
    logprob: float | None
    version: int
    kv_version: int


@st.composite
def episodes(draw: st.DrawFn) -> list[Token]:
    """Prompt, then turns of sampled tokens, sometimes forced closers, and an observation; versions never fall."""
    tokens: list[Token] = []
    ids = st.integers(0, 2**31 - 1)

    def forced(author: Author, turn: int, most: int) -> None:
        for _ in range(draw(st.integers(0, most))):
            tokens.append(Token(draw(ids), author, turn, None, NO_VERSION, NO_VERSION))

    forced(Author.SYSTEM, -1, 2)
    forced(Author.USER, -1, 3)
    version = 0
    for turn in range(draw(st.integers(0, 3))):
        for _ in range(draw(st.integers(0, 5))):
            version += draw(st.integers(0, 1))
            logprob = draw(st.floats(-30, 0, width=32))
            tokens.append(Token(draw(ids), Author.ASSISTANT, turn, logprob, version, draw(st.integers(0, version))))
        forced(Author.ASSISTANT, turn, 1)
        forced(Author.OBSERVATION, turn, 3)
    return tokens


def as_log(tokens: list[Token]) -> TokenLog:
    """The unsplit log, built token by token."""
    segments: list[list[int]] = []
    for token in tokens:
        if segments and segments[-1][:2] == [token.author, token.turn]:
            segments[-1][2] += 1
        else:
            segments.append([int(token.author), token.turn, 1])
    return TokenLog(
        tokens=np.array([t.id for t in tokens], np.int32),
        mask=np.array([t.logprob is not None for t in tokens], np.uint8),
        logprobs=np.array([t.logprob or 0.0 for t in tokens], np.float32),
        versions=np.array([t.version for t in tokens], np.int32),
        kv_versions=np.array([t.kv_version for t in tokens], np.int32),
        segments=[Segment(*s) for s in segments],
    )


def piece(tokens: list[Token]) -> TokenLog:
    """The log of tokens of one author, turn and kind, made the way the rollout node makes it."""
    if not tokens:
        return context([], Author.USER, -1)
    ids = [t.id for t in tokens]
    if tokens[0].logprob is None:
        return context(ids, tokens[0].author, tokens[0].turn)
    logprobs = [t.logprob or 0.0 for t in tokens]
    return sampled(ids, logprobs, [t.version for t in tokens], [t.kv_version for t in tokens], tokens[0].turn)


def pieces(tokens: list[Token], cuts: set[int]) -> list[TokenLog]:
    """The episode cut at `cuts` and wherever author, turn or kind change."""
    parts: list[list[Token]] = [[]]
    for index, token in enumerate(tokens):
        last = parts[-1][-1] if parts[-1] else token
        kind = (token.author, token.turn, token.logprob is None)
        if index in cuts or kind != (last.author, last.turn, last.logprob is None):
            parts.append([])
        parts[-1].append(token)
    return [piece(part) for part in parts]


def assert_equal(left: TokenLog, right: TokenLog) -> None:
    for name in ("tokens", "mask", "logprobs", "versions", "kv_versions"):
        a, b = getattr(left, name), getattr(right, name)
        assert a.dtype == b.dtype and np.array_equal(a, b), name
    assert left.segments == right.segments


@given(episodes(), st.data())
def test_f26_a_call_split_anywhere_joins_to_the_unsplit_log(tokens: list[Token], data: st.DataObject) -> None:
    cuts = data.draw(st.sets(st.integers(0, max(0, len(tokens) - 1))))
    whole = as_log(tokens)
    joined = concat(pieces(tokens, cuts))
    assert_equal(joined, whole)
    joined.validate()
    regrouped = concat([concat(pieces(tokens, cuts)[:2]), concat(pieces(tokens, cuts)[2:])])
    assert_equal(regrouped, whole)


@given(episodes())
def test_f26_every_single_cut(tokens: list[Token]) -> None:
    for position in range(len(tokens)):
        assert_equal(concat(pieces(tokens, {position})), as_log(tokens))


@given(episodes())
def test_a_log_survives_the_wire_in_pieces(tokens: list[Token]) -> None:
    bodies = [wire.encode(DeltaBody(part)) for part in pieces(tokens, set())]
    joined = concat(wire.decode(body, DeltaBody).log for body in bodies)
    assert_equal(joined, as_log(tokens))
    assert len(joined) == len(tokens)


@given(episodes())
def test_sampled_by_version_counts_every_sampled_token_once(tokens: list[Token]) -> None:
    found = as_log(tokens).sampled_by_version()
    versions = [t.version for t in tokens if t.logprob is not None]
    assert found == [(v, versions.count(v)) for v in sorted(set(versions))]


def good() -> TokenLog:
    prompt = context([5, 6], Author.USER, -1)
    return concat([prompt, sampled([7, 8], [-0.5, -1.0], [3, 4], [3, 3], 0), context([9], Author.OBSERVATION, 0)])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mask": np.zeros(4, np.uint8)}, "mask has 4 entries for 5 tokens"),
        ({"logprobs": np.zeros(6, np.float32)}, "logprobs has 6 entries"),
        ({"versions": np.zeros(0, np.int32)}, "versions has 0 entries"),
        ({"kv_versions": np.zeros(1, np.int32)}, "kv_versions has 1 entries"),
        ({"tokens": np.zeros((5, 1), np.int32)}, "tokens is a 2-dimensional array"),
        ({"tokens": np.zeros(5, np.float32)}, "tokens is a 1-dimensional array of float32"),
        ({"tokens": np.array([1, 2, -3, 4, 5], np.int32)}, "token id is negative"),
        ({"segments": [Segment(1, -1, 4)]}, "segments cover 4 of 5"),
        ({"segments": [Segment(1, -1, 5), Segment(3, 0, 0)]}, "a segment is empty"),
        ({"segments": [Segment(9, -1, 5)]}, "by nobody"),
        ({"segments": [Segment(1, -1, 3), Segment(2, 0, 1), Segment(3, 0, 1)]}, "sampled tokens in a segment by USER"),
        ({"mask": np.array([0, 0, 1, 2, 0], np.uint8)}, "other than 0 and 1"),
        ({"logprobs": np.array([0, 0, np.nan, -1, 0], np.float32)}, "no valid log-probability"),
        ({"logprobs": np.array([0, 0, -np.inf, -1, 0], np.float32)}, "no valid log-probability"),
        ({"logprobs": np.array([0, 0, 0.5, -1, 0], np.float32)}, "no valid log-probability"),
        ({"versions": np.array([-1, -1, -1, 4, -1], np.int32)}, "no weight version"),
        ({"kv_versions": np.array([-1, -1, 3, -1, -1], np.int32)}, "no weight version"),
        ({"versions": np.array([-1, 0, 3, 4, -1], np.int32)}, "not sampled carries"),
        ({"kv_versions": np.array([-1, -1, 3, 4, 2], np.int32)}, "not sampled carries"),
        ({"logprobs": np.array([-0.1, 0, -0.5, -1, 0], np.float32)}, "not sampled carries"),
    ],
)
def test_f11_f12_what_is_missing_or_does_not_fit_is_refused(changes: dict[str, Any], sentence: str) -> None:
    good().validate()
    with pytest.raises(ValueError, match=sentence):
        msgspec.structs.replace(good(), **changes).validate()


def test_forced_tokens_inside_an_assistant_segment_carry_no_loss() -> None:
    log = concat([sampled([7], [-0.5], [3], [3], 0), context([2], Author.ASSISTANT, 0)])
    log.validate()
    assert log.segments == [Segment(int(Author.ASSISTANT), 0, 2)] and log.mask.tolist() == [1, 0]


def test_an_empty_log_is_whole() -> None:
    for log in (concat([]), context([], Author.USER, -1), sampled([], [], [], [], 0)):
        log.validate()
        assert len(log) == 0 and log.segments == [] and log.sampled_by_version() == []
        assert_equal(concat([log, good(), log]), good())


def test_the_return_is_the_sum_of_the_turn_rewards() -> None:
    trajectory = Trajectory(1, 2, 3, "t", "train", good(), [0.25, -1.0, 2.0], "terminated", 1.0, {})
    assert trajectory.reward == 1.25
    assert Trajectory(1, 2, 3, "t", "train", good(), [], "terminated", 1.0, {}).reward == 0.0
