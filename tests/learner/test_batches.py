"""Batches: decoded as sampled, refused when incomplete, judged by age and outcome, dealt to ranks and optimizer steps."""

from __future__ import annotations

import zlib
from dataclasses import replace as dataclass_replace
from typing import Any

import msgspec
import numpy as np
import pytest
from learner_data import batch_of, learner_config, member_payload, prepare_batch, random_batch, random_log

from learner.batches import BatchRefused, PreparedBatch, decode_batch, judge
from segue import wire
from segue.episode import DeltaBody
from segue.ports.learner import Batch, GroupPayload
from segue.trajectory import Author, TokenLog, concat, context, sampled


def _one(log: TokenLog, rewards: list[float] | None = None, **extra: Any) -> Batch:
    return batch_of([[(log, rewards or [1.0])]], **extra)


def _log(versions: list[int], kv: list[int] | None = None, prompt: int = 3, after: int = 0) -> TokenLog:
    n = len(versions)
    parts = [context(list(range(5, 5 + prompt)), Author.USER, -1), sampled([9] * n, [-1.0] * n, versions, kv or versions, 0)]
    if after:
        parts.append(context([7] * after, Author.OBSERVATION, 0))
    return concat(parts)


@pytest.mark.parametrize("piece", [1, 2, 1000])
def test_a_trajectory_is_the_concatenation_of_its_deltas(piece: int) -> None:
    """F12, F83: paused at every token or never, mask, log-probs and versions are those of the uninterrupted run."""
    rng = np.random.default_rng(0)
    for turns in (1, 2, 3):
        log = random_log(rng, turns, [0, 1])
        group = GroupPayload(4, "task", 1, 0.7, [member_payload(log, [0.5] * turns, episode=8, piece=piece)])
        (found,) = decode_batch(Batch(1, [group], {0: 0, 1: 1}))
        for name in ("tokens", "mask", "logprobs", "versions", "kv_versions"):
            np.testing.assert_array_equal(getattr(found.log, name), getattr(log, name))
        assert found.log.segments == log.segments
        assert found.turn_rewards == [0.5] * turns and found.reward == 0.5 * turns
        assert (found.episode, found.group, found.temperature) == (8, 4, 0.7)


def _spoilt(change: Any) -> Batch:
    """A batch of one episode (7) whose every delta with sampled tokens went through `change`."""
    payload = member_payload(_log([0, 0, 0]), [1.0], episode=7)
    deltas = []
    for raw in payload.deltas:
        body = wire.decode(raw, DeltaBody)
        deltas.append(wire.encode(change(body)) if body.log.mask.any() else raw)
    return Batch(0, [GroupPayload(3, "t", 1, 1.0, [msgspec.structs.replace(payload, deltas=deltas)])], {0: 0})


def _with_log(body: DeltaBody, **fields: Any) -> DeltaBody:
    return msgspec.structs.replace(body, log=msgspec.structs.replace(body.log, **fields))


@pytest.mark.parametrize(
    "change",
    [
        lambda body: _with_log(body, logprobs=np.full(3, np.nan, dtype=np.float32)),
        lambda body: _with_log(body, logprobs=np.full(3, 0.5, dtype=np.float32)),  # a placeholder that is no log-probability
        lambda body: _with_log(body, logprobs=np.zeros(0, dtype=np.float32)),
        lambda body: _with_log(body, versions=np.full(3, -1, dtype=np.int32)),
        lambda body: _with_log(body, mask=np.ones(2, dtype=np.uint8)),
    ],
)
def test_missing_fields_are_refused_and_never_imputed(change: Any) -> None:
    """F11, F17: absent or NaN log-probabilities of a sampled token raise; no weight silently becomes 1."""
    with pytest.raises(BatchRefused, match=r"episode 7 of group 3 cannot be trained"):
        prepare_batch(_spoilt(change), learner_config())


def test_damaged_incomplete_or_contradictory_members_are_refused() -> None:
    good = member_payload(_log([0, 0]), [1.0], episode=7)

    def batch(**fields: Any) -> Batch:
        return Batch(0, [GroupPayload(3, "t", 1, 1.0, [msgspec.structs.replace(good, **fields)])], {0: 0})

    cut = [*good.deltas[:-1], good.deltas[-1][:-2]]
    with pytest.raises(BatchRefused, match="episode 7 of group 3 has a delta that does not decode"):
        prepare_batch(batch(deltas=cut), learner_config())
    with pytest.raises(BatchRefused, match=r"reports a return of 2\.0, but its turns add up to 1\.0"):
        prepare_batch(batch(reward=2.0), learner_config())
    two = member_payload(random_log(np.random.default_rng(0), 2), [0.0, 1.0], episode=7)
    without = [raw for raw in two.deltas if (r := wire.decode(raw, DeltaBody).record) is None or r.turn != 0]
    with pytest.raises(BatchRefused, match="with gaps"):
        prepare_batch(
            Batch(0, [GroupPayload(3, "t", 1, 1.0, [msgspec.structs.replace(two, deltas=without)])], {0: 0}), learner_config()
        )
    with pytest.raises(BatchRefused, match="episode 0 of group 10: weight version 5 has no step"):
        prepare_batch(_one(_log([5])), learner_config())
    with pytest.raises(BatchRefused, match="after the step 0"):
        prepare_batch(_one(_log([1]), version_steps={1: 1}), learner_config())


def test_the_age_changes_exactly_where_the_update_was() -> None:
    (member,), _ = judge(decode_batch(_one(_log([0, 0, 1, 1, 2]))), 3, {0: 0, 1: 1, 2: 3}, learner_config())
    assert member.ages.tolist() == [0, 0, 0, 3, 3, 2, 2, 0]


def test_over_age_tokens_lose_their_gradient_and_keep_their_reward_in_the_baseline() -> None:
    old, fresh = _log([0, 0, 5, 5]), _log([5, 5])
    batch = batch_of([[(old, [1.0]), (fresh, [0.0])]], step=5, version_steps={0: 0, 5: 5})
    config = learner_config(staleness={"max_age": 2}, learner={"advantage": "dr_grpo"})
    (first, second), _ = judge(decode_batch(batch), 5, batch.version_steps, config)
    assert first.keep.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert (first.advantage, second.advantage) == (0.5, -0.5)
    prepared = prepare_batch(batch, config)
    assert prepared.ages == [4] and prepared.stats["tokens_masked_age"] == 2
    assert prepared.stats["masked_position_mean"] == pytest.approx((3 / 7 + 4 / 7) / 2)
    assert prepared.stats["age_generated_max"] == 5 and prepared.stats["age_trained_max"] == 0
    dropped = prepare_batch(batch, learner_config(staleness={"max_age": 2, "over_age": "drop"}))
    assert dropped.ages == [2] and dropped.stats["trajectories_trained"] == 1
    waived = prepare_batch(batch, learner_config(staleness={"max_age": 2, "over_age": "train"}))
    assert waived.ages == [4, 0, 0, 0, 0, 2]


def test_outcomes_that_say_too_little_are_in_neither_loss_nor_baseline() -> None:
    payloads = [
        member_payload(_log([0]), [1.0], 0),
        member_payload(_log([0]), [0.0], 1),
        member_payload(_log([0, 0]), [0.0], 2, outcome="truncated_tokens"),
        member_payload(_log([0]), [0.0], 3, outcome="truncated_turns"),
    ]
    batch = Batch(0, [GroupPayload(3, "t", 4, 1.0, payloads)], {0: 0})
    config = learner_config(learner={"advantage": "dr_grpo"})
    members, _ = judge(decode_batch(batch), 0, {0: 0}, config)
    assert [m.advantage for m in members] == pytest.approx([2 / 3, -1 / 3, 0, -1 / 3])
    prepared = prepare_batch(batch, config)
    assert prepared.action_tokens == 3
    assert prepared.stats["trajectories_masked_outcome"] == 1 and prepared.stats["tokens_masked_outcome"] == 2
    assert prepared.stats["tokens_masked_age"] == 0
    assert prepared.stats["outcome_truncated_tokens"] == 0.25 and prepared.stats["outcome_terminated"] == 0.5
    assert prepared.stats["reward_std"] == pytest.approx(np.std([1, 0, 0, 0]))  # before any filter


def _tokens_of(prepared: PreparedBatch) -> list[tuple[int, int]]:
    """(trajectory, token) of every sampled token in a rank's rows."""
    return [
        (int(s), int(t))
        for micros in prepared.minibatches
        for micro in micros
        for s, t in zip(micro.row.sequence, micro.row.targets, strict=True)
    ]


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sampled_token_is_in_exactly_one_rank(world: int, minibatches: int) -> None:
    config = learner_config(learner={"pack_tokens": 64, "minibatches": minibatches})
    batch = random_batch(groups=5)
    shares = [prepare_batch(batch, config, rank, world) for rank in range(world)]
    shapes = {tuple(tuple(micro.grad for micro in micros) for micros in share.minibatches) for share in shares}
    assert len(shapes) == 1 and len(shares[0].minibatches) == minibatches
    found = sorted(token for share in shares for token in _tokens_of(share))
    logs = [t.log for t in decode_batch(batch)]
    assert found == sorted((i, int(t)) for i, log in enumerate(logs) for t in log.tokens[log.mask == 1])
    for index in range(minibatches):  # each optimizer step has whole groups, and denominators of its own
        groups = {s.members[int(i)].trajectory.group for s in shares for m in s.minibatches[index] for i in m.row.sequence}
        others = {
            s.members[int(i)].trajectory.group
            for s in shares
            for j, micros in enumerate(s.minibatches)
            if j != index
            for m in micros
            for i in m.row.sequence
        }
        assert not groups & others
        total = sum(float(m.row.fields["scale"].sum()) for s in shares for m in s.minibatches[index])
        assert total == pytest.approx(1.0, rel=1e-5)


def test_only_rows_that_can_move_the_weights_go_backward() -> None:
    same, other = [(_log([0]), [1.0]), (_log([0]), [1.0])], [(_log([0]), [1.0]), (_log([0]), [0.0])]
    (micros,) = prepare_batch(batch_of([same, other]), learner_config()).minibatches
    assert [(m.grad, sorted(set(m.row.sequence.tolist()))) for m in micros] == [(False, [0, 1]), (True, [2, 3])]
    (alone,) = prepare_batch(batch_of([same]), learner_config()).minibatches
    assert [m.grad for m in alone] == [True]


def test_all_fields_are_those_of_the_same_token_and_b_is_never_touched() -> None:
    """Under kept KV only the recorded b is the behaviour probability: its checksum is the log's."""
    rng = np.random.default_rng(3)
    log = random_log(rng, 3, [0, 1], kept=True)
    prepared = prepare_batch(_one(log, [0.0, 0.0, 1.0], step=1, version_steps={0: 0, 1: 1}, temperature=0.7), learner_config())
    row = prepared.minibatches[0][0].row
    at = np.flatnonzero(log.mask)
    assert zlib.crc32(row.fields["behaviour"].numpy().tobytes()) == zlib.crc32(log.logprobs[at].tobytes())
    assert row.targets.tolist() == log.tokens[at].tolist()
    assert row.fields["version"].tolist() == log.versions[at].tolist()
    assert row.fields["clean_kv"].tolist() == (log.kv_versions[at] == log.versions[at]).tolist()
    assert row.fields["age"].tolist() == (1 - log.versions[at]).tolist()
    assert np.allclose(row.fields["temperature"].numpy(), 0.7)


def test_the_same_batch_is_prepared_the_same_way() -> None:
    config = learner_config(learner={"minibatches": 3, "pack_tokens": 64})
    first, second = (prepare_batch(random_batch(groups=6), config) for _ in range(2))
    assert _tokens_of(first) == _tokens_of(second) and first.stats == second.stats
    other = prepare_batch(dataclass_step(random_batch(groups=6), 4), config)
    assert _tokens_of(other) != _tokens_of(first)  # the order of optimizer steps differs from batch to batch


def dataclass_step(batch: Batch, step: int) -> Batch:
    return msgspec.structs.replace(batch, step=step)


def test_statistics_of_a_hand_made_batch() -> None:
    groups = [
        [(_log([0, 0]), [1.0]), (_log([0, 1], after=2), [0.0])],
        [(_log([1]), [0.5]), (_log([1, 1, 1]), [0.5])],
    ]
    batch = batch_of(groups, step=1, version_steps={0: 0, 1: 1}, info={"success": 1.0})
    prepared = prepare_batch(batch, learner_config())
    stats = prepared.stats
    assert (stats["groups"], stats["groups_zero_variance"], stats["groups_single_member"]) == (2, 1, 0)
    assert stats["reward_mean"] == 0.5 and stats["reward_std"] == 0.25
    assert stats["tokens_generated"] == stats["tokens_trained"] == 8
    assert stats["age_trained_mean"] == pytest.approx(3 / 8)
    assert prepared.ages == [5, 3]
    assert stats["trajectories_multi_version"] == 1
    assert stats["info_success"] == 1.0
    assert dataclass_replace(prepared, step=2).members is prepared.members
