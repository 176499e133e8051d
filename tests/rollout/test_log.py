"""An episode's log: what it says to do next, and that a log read back from deltas is the log that was written (F12, F26)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.log import BadLog, Budget, EpisodeLog, Phase, Piece
from segue import wire
from segue.episode import ActionRecord, DeltaBody, EpisodeSnapshot, Outcome, TurnRecord, log_checksum
from segue.ports.engine import Chunk
from segue.ports.rollout import Delta
from segue.trajectory import Author, TokenLog, concat, context

BUDGET = Budget(max_turns=4, max_tokens=60, max_turn_tokens=8, closing=1)
CLOSE = 9


def record(turn: int, *, done: bool = False, truncated: bool = False, snapshot: bytes | None = None) -> TurnRecord:
    return TurnRecord(turn, 0.25 * (turn + 1), done, truncated, f"action {turn}", 100 + turn, snapshot, {"turns": turn + 1.0})


def prompt(n: int = 5) -> DeltaBody:
    return DeltaBody(context(list(range(20, 20 + n)), Author.USER, -1), record(-1, snapshot=b"start"))


def chunk(start: int, n: int, version: int = 3) -> Chunk:
    tokens = list(range(start, start + n))
    return Chunk(tokens, [-0.5 - t / 64 for t in tokens], [(version, n)] if n else [], version)


def action(turn: int, start: int, n: int, version: int = 3, closing: tuple[int, ...] = (CLOSE,)) -> DeltaBody:
    piece = Piece(turn)
    piece.take(chunk(start, n, version))
    return piece.complete(closing, f"action {turn}")


def answer(turn: int, n: int = 3, **kind: Any) -> DeltaBody:
    return DeltaBody(context([50] * n, Author.OBSERVATION, turn), record(turn, **kind))


def state(log: EpisodeLog) -> dict[str, Any]:
    """Everything an `EpisodeLog` knows, and what it concludes."""
    fields = {k: v for k, v in vars(log).items() if k != "_budget"}
    return fields | {"phase": log.phase, "outcome": log.outcome, "room": log.room, "environment": log.environment()}


def restored(deltas: list[Delta]) -> EpisodeLog:
    return EpisodeLog.restore(EpisodeSnapshot(next_seq=len(deltas), deltas=[d.payload for d in deltas]), BUDGET)


def test_a_life_says_what_comes_next() -> None:
    log = EpisodeLog(BUDGET)
    assert (log.phase, log.turn, log.environment()) == (Phase.RESET, -1, None)
    first = log.write(prompt(), 7, 2)
    assert first.head.seq == 0 and first.head.record and first.head.turn == -1 and first.head.attempt == 2
    assert (log.phase, log.prompt, log.allowance) == (Phase.GENERATE, 5, 8)
    assert log.environment() is not None and log.environment().snapshot == b"start"  # type: ignore[union-attr]
    acted = log.write(action(0, 30, 6), 7, 2)
    assert acted.head.pending_action and not acted.head.record and acted.head.sampled == ((3, 6),)
    assert (log.phase, log.waiting, log.action) == (Phase.STEP, "action 0", list(range(30, 36)))
    seen = log.write(answer(0), 7, 2)
    assert seen.head.record and seen.head.reward == 0.25
    assert (log.phase, log.turn, log.waiting, log.action) == (Phase.GENERATE, 1, None, [])
    environment = log.environment()
    assert environment is not None and (environment.snapshot, environment.snapshot_turn) == (b"start", -1)
    assert environment.replay == [ActionRecord("action 0", 100)]
    log.write(action(1, 40, 2), 7, 2)
    log.write(answer(1, 0, done=True), 7, 2)
    assert (log.phase, log.outcome, log.reward) == (Phase.OVER, Outcome.TERMINATED, 0.0 + 0.25 + 0.5)
    assert log.info == {"turns": 2.0}


@pytest.mark.parametrize(
    ("kind", "turns", "outcome"),
    [
        ({"done": True}, 4, Outcome.TERMINATED),  # on the last allowed turn it is terminated, not truncated
        ({"truncated": True}, 2, Outcome.TRUNCATED_ENV),
        ({}, 4, Outcome.TRUNCATED_TURNS),
        ({}, 3, None),
    ],
)
def test_outcome_by_turns(kind: dict[str, bool], turns: int, outcome: Outcome | None) -> None:
    log = EpisodeLog(BUDGET)
    log.write(prompt(), 0, 1)
    for turn in range(turns):
        log.write(action(turn, 30, 2), 0, 1)
        log.write(answer(turn, **(kind if turn == turns - 1 else {})), 0, 1)
    assert log.outcome == outcome


@pytest.mark.parametrize(("observation", "room", "outcome"), [(50, 1, None), (51, 0, Outcome.TRUNCATED_TOKENS)])
def test_an_exact_fit_of_the_context_is_kept(observation: int, room: int, outcome: Outcome | None) -> None:
    """60 tokens may be used, one of them to close the turn: with 58 one more can be sampled."""
    log = EpisodeLog(BUDGET)
    log.write(prompt(), 0, 1)
    log.write(action(0, 30, 2), 0, 1)
    log.write(answer(0, observation), 0, 1)
    assert (log.room, log.allowance, log.outcome) == (room, room, outcome)


def test_allowances_count_what_was_sampled_before_an_interruption() -> None:
    """F18."""
    log = EpisodeLog(BUDGET)
    log.write(prompt(), 0, 1)
    piece = Piece(0)
    for sampled in (3, 4):
        piece.take(chunk(30, sampled))
        log.write(piece.flush(), 0, 1)
    assert log.allowance == restored([]).allowance - 7 == 1
    piece.take(chunk(40, 1))
    log.write(piece.flush(), 0, 1)
    assert (log.allowance, log.phase) == (0, Phase.GENERATE), "the turn is used up and still has to be closed"


# --- the property: a log written here, and read there at any delta, is one and the same ---------------------------------


@st.composite
def episodes(draw: st.DrawFn) -> tuple[list[DeltaBody], TokenLog]:
    """An episode's deltas, its actions cut into pieces anywhere, and the whole log without cuts."""
    deltas, whole = [prompt(draw(st.integers(1, 6)))], []
    whole.append(deltas[0].log)
    turns = draw(st.integers(0, 4))
    version = 1
    for turn in range(turns):
        n = draw(st.integers(1, 8))
        cuts = sorted(draw(st.sets(st.integers(1, n), max_size=3)))
        piece, parts = Piece(turn), []
        start = 0
        for stop in [*cuts, n]:
            if draw(st.booleans()):
                version += 1
            piece.take(chunk(30 + start, stop - start, version))
            parts.append(chunk(30 + start, stop - start, version))
            if stop < n:
                deltas.append(piece.flush())
            start = stop
        closing = draw(st.sampled_from([(), (CLOSE,)]))
        deltas.append(piece.complete(closing, f"action {turn}"))
        unsplit = Piece(turn)
        for part in parts:
            unsplit.take(part)
        whole.append(unsplit.complete(closing, "").log)
        if turn < turns - 1 or draw(st.booleans()):
            snapshot = f"after {turn}".encode() if draw(st.booleans()) else None
            done = turn == turns - 1 and draw(st.booleans())
            deltas.append(answer(turn, draw(st.integers(0, 4)), done=done, snapshot=snapshot))
            whole.append(deltas[-1].log)
    return deltas, concat(whole)


@settings(max_examples=60, deadline=None)
@given(episodes())
def test_reading_the_deltas_back_gives_the_log_that_was_written(episode: tuple[list[DeltaBody], TokenLog]) -> None:
    """At every delta: write on here, or restore elsewhere and write on there: the same states and the same payloads."""
    bodies, whole = episode
    live = EpisodeLog(BUDGET)
    deltas: list[Delta] = []
    for i, body in enumerate(bodies):
        deltas.append(live.write(body, 5, 1))
        elsewhere = restored(deltas)
        assert state(elsewhere) == state(live)
        rest = [elsewhere.write(later, 5, 2).payload for later in bodies[i + 1 :]]
        assert [d.payload for d in deltas] + rest == [wire.encode(b) for b in bodies]
    assert live.checksum == log_checksum(wire.encode(b) for b in bodies)
    joined = concat([wire.decode(d.payload, DeltaBody).log for d in deltas])
    joined.validate()
    for field in ("tokens", "mask", "logprobs", "versions", "kv_versions"):
        assert np.array_equal(getattr(joined, field), getattr(whole, field)), field
    assert joined.segments == whole.segments
    assert live.tokens == whole.tokens.tolist() and live.sampled == int(whole.mask.sum())


@pytest.mark.parametrize("at", range(1, 8))
def test_an_action_cut_at_every_token_is_the_uncut_one(at: int) -> None:
    """F26: every per-token array goes through the same join."""
    whole, cut = Piece(0), Piece(0)
    whole.take(chunk(30, 8))
    cut.take(chunk(30, at))
    first = cut.flush()
    cut.take(chunk(30 + at, 8 - at))
    second = cut.complete((CLOSE,), "text")
    expected, found = whole.complete((CLOSE,), "text").log, concat([first.log, second.log])
    for field in ("tokens", "mask", "logprobs", "versions", "kv_versions"):
        assert np.array_equal(getattr(found, field), getattr(expected, field)), field
    assert found.segments == expected.segments


def test_a_chunk_across_an_update_has_two_versions() -> None:
    """F01: versions come from the engine's spans, token by token."""
    piece = Piece(0)
    piece.take(Chunk([1, 2, 3], [-1.0, -1.0, -1.0], [(4, 2), (5, 1)], 4))
    log = piece.flush().log
    assert log.versions.tolist() == [4, 4, 5] and log.kv_versions.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    "bad",
    [
        Chunk([1, 2], [-1.0], [(1, 2)], 1),
        Chunk([1, 2], [-1.0, -1.0], [(1, 1)], 1),
        Chunk([1], [float("nan")], [(1, 1)], 1),
        Chunk([1], [0.5], [(1, 1)], 1),
        Chunk([1], [-0.5], [(-1, 1)], 1),
    ],
)
def test_output_with_missing_or_impossible_values_is_refused(bad: Chunk) -> None:
    """F11: nothing is imputed."""
    with pytest.raises(BadLog):
        Piece(0).take(bad)


def sequences() -> dict[str, list[DeltaBody]]:
    unmasked = context([50], Author.OBSERVATION, 0)
    wrong = TokenLog(unmasked.tokens, np.ones(1, np.uint8), unmasked.logprobs, unmasked.versions, unmasked.kv_versions, [])
    return {
        "no prompt": [action(0, 30, 2)],
        "record of another turn": [prompt(), action(0, 30, 2), answer(1)],
        "record without action": [prompt(), answer(0)],
        "action after action": [prompt(), action(0, 30, 2), action(0, 30, 2)],
        "tokens of another turn": [prompt(), action(1, 30, 2)],
        "policy tokens in a record": [prompt(), action(0, 30, 2), DeltaBody(action(0, 30, 2).log, record(0))],
        "lengths disagree": [prompt(), action(0, 30, 2), DeltaBody(wrong, record(0))],
    }


@pytest.mark.parametrize("name", sequences())
def test_deltas_that_do_not_follow_are_refused_and_change_nothing(name: str) -> None:
    *good, bad = sequences()[name]
    log = EpisodeLog(BUDGET)
    for body in good:
        log.write(body, 0, 1)
    before = {k: list(v) if isinstance(v, list) else v for k, v in vars(log).items()}
    with pytest.raises(BadLog):
        log.write(bad, 0, 1)
    assert {k: list(v) if isinstance(v, list) else v for k, v in vars(log).items()} == before


def test_a_damaged_snapshot_is_refused() -> None:
    log = EpisodeLog(BUDGET)
    deltas = [log.write(prompt(), 0, 1).payload]
    with pytest.raises(BadLog, match="does not decode"):
        EpisodeLog.restore(EpisodeSnapshot(next_seq=1, deltas=[deltas[0][:-1]]), BUDGET)
    with pytest.raises(BadLog, match="says that delta 2 comes next"):
        EpisodeLog.restore(EpisodeSnapshot(next_seq=2, deltas=deltas), BUDGET)
