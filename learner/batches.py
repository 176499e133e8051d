"""From the scheduler's batch messages to packed micro-batches: decode, advantages and ages, pack.

Every rank takes the whole batch, so that advantages and denominators are global by construction, and packs its own share of it.
Nothing here depends on the weights: the next batch can be prepared while the current one trains (`learner.pipeline`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from learner.advantages import GroupAdvantages, group_advantages
from learner.aggregate import token_scales
from learner.diagnostics import Lengths, age_diagnostics, context_diagnostics, length_diagnostics, mean_info
from learner.packing import Row, pack, plan, useful_length
from learner.staleness import assert_bound, keep_mask, token_ages
from segue import wire
from segue.config import Config
from segue.episode import DeltaBody, Outcome, Purpose
from segue.errors import WireError
from segue.ports.learner import Batch, GroupPayload, MemberPayload
from segue.trajectory import Trajectory, concat

Array = np.ndarray[Any, Any]


class BatchRefused(ValueError):
    """A batch that must not be trained; the sentence names the episode and what is wrong with it."""


@dataclass(frozen=True)
class Member:
    """One trajectory with what the learner adds. `ages` int32 [T] and `keep` uint8 [T] (q) are 0 where its mask is 0.

    `valid` is False for outcomes that `learner.mask_outcomes` keeps out of loss and baseline.
    """

    trajectory: Trajectory
    valid: bool
    ages: Array
    keep: Array
    advantage: float = 0.0


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. Without `grad` nothing in it can move the weights (all advantages or all q are 0): no backward pass."""

    row: Row
    grad: bool


@dataclass(frozen=True)
class PreparedBatch:
    """One rank's share of a batch: micro-batches per optimizer step, equally many on every rank.

    `stats` and `ages` are those of the whole batch (`ages[a]` = trained tokens of age a), `action_tokens` counts the sampled
    tokens of all ranks' rows.
    """

    step: int
    minibatches: list[list[MicroBatch]]
    members: list[Member]
    stats: dict[str, float]
    ages: list[int]
    action_tokens: int
    version_steps: dict[int, int]

    def pin_memory(self, device: str | None = None) -> PreparedBatch:
        """With all rows in page-locked memory; called by torchdata's PinMemory."""
        pinned = [[MicroBatch(micro.row.pin_memory(), micro.grad) for micro in micros] for micros in self.minibatches]
        return replace(self, minibatches=pinned)


def decode_batch(batch: Batch) -> list[Trajectory]:
    """The trajectories of a batch, in its order. Raises `BatchRefused`: damaged deltas, fields missing or of unequal length."""
    return [decode_member(group, member) for group in batch.groups for member in group.members]


def decode_member(group: GroupPayload, member: MemberPayload) -> Trajectory:
    """One trajectory from its accepted deltas, in order. Nothing is ever imputed (faults.md F11, F12)."""
    where = f"episode {member.episode} of group {group.group}"
    try:
        bodies = [wire.decode(delta, DeltaBody) for delta in member.deltas]
    except WireError as error:
        raise BatchRefused(f"{where} has a delta that does not decode ({error})") from error
    rewards = {body.record.turn: body.record.reward for body in bodies if body.record is not None and body.record.turn >= 0}
    if sorted(rewards) != list(range(len(rewards))):
        raise BatchRefused(f"{where} has records of turns {sorted(rewards)}, with gaps")
    try:
        log = concat(body.log for body in bodies)
        log.validate()
    except ValueError as error:
        raise BatchRefused(f"{where} cannot be trained: {error}") from error
    turn_rewards = [rewards[turn] for turn in range(len(rewards))]
    if not np.isclose(sum(turn_rewards), member.reward, rtol=1e-6, atol=1e-6):
        raise BatchRefused(f"{where} reports a return of {member.reward}, but its turns add up to {sum(turn_rewards)}")
    return Trajectory(
        episode=member.episode,
        group=group.group,
        member=member.member,
        task=group.task,
        purpose=str(Purpose.TRAIN),
        log=log,
        turn_rewards=turn_rewards,
        outcome=member.outcome,
        temperature=group.temperature,
        info=member.info,
    )


def judge(
    trajectories: Sequence[Trajectory], step: int, version_steps: Mapping[int, int], config: Config
) -> tuple[list[Member], GroupAdvantages]:
    """Ages, keep masks and advantages. Asserts promise 2; raises `BatchRefused` on a stamp that cannot be true."""
    rule = config.staleness
    valid = [t.outcome not in config.learner.mask_outcomes for t in trajectories]
    found = group_advantages([t.reward for t in trajectories], [t.group for t in trajectories], config.learner.advantage, valid)
    members = []
    for trajectory, ok, advantage in zip(trajectories, valid, found.values, strict=True):
        log = trajectory.log
        try:
            ages = token_ages(log.versions, log.mask, version_steps, step)
        except ValueError as error:
            raise BatchRefused(f"episode {trajectory.episode} of group {trajectory.group}: {error}") from error
        keep = keep_mask(ages, log.mask, rule.max_age, rule.over_age) if ok else np.zeros_like(log.mask)
        assert_bound(ages, keep, rule.max_age, rule.over_age)
        members.append(Member(trajectory, ok, ages, keep, float(advantage)))
    return members, found


def arrange(members: Sequence[Member], step: int, config: Config, rank: int, world: int) -> list[list[MicroBatch]]:
    """This rank's micro-batches per optimizer step. The same plan is made on every rank, from the whole batch.

    Groups are dealt to optimizer steps whole, in an order fixed by (seed, step); a step without trainable tokens is left out.
    """
    learner = config.learner
    groups = list(dict.fromkeys(member.trajectory.group for member in members))
    order = np.random.default_rng([config.seed, step]).permutation(len(groups)) if learner.minibatches > 1 else range(len(groups))
    result = []
    for part in np.array_split(np.asarray(order, dtype=int), learner.minibatches):
        here = {groups[i] for i in part}
        chosen = [i for i, m in enumerate(members) if m.valid and m.trajectory.group in here and m.trajectory.log.mask.any()]
        if chosen:
            result.append(_micro_batches(members, chosen, config, rank, world))
    return result


def _micro_batches(members: Sequence[Member], chosen: list[int], config: Config, rank: int, world: int) -> list[MicroBatch]:
    learner = config.learner
    scales = token_scales(
        [int(members[i].trajectory.log.mask.sum()) for i in chosen], learner.aggregation, learner.constant_length
    )
    scale_of = dict(zip(chosen, scales, strict=True))
    fields: dict[str, list[Array]] = {name: [] for name in _FIELDS}
    ends = [useful_length(member.trajectory.log.mask) for member in members]
    for i, member in enumerate(members):
        for name, value in _token_fields(member, scale_of.get(i, 0.0)).items():
            fields[name].append(value[: ends[i]])
    tokens = [member.trajectory.log.tokens[:end] for member, end in zip(members, ends, strict=True)]
    masks = [member.trajectory.log.mask[:end] for member, end in zip(members, ends, strict=True)]
    live = [i for i in chosen if members[i].advantage != 0.0 and members[i].keep.any()]
    # Zero gradients are not the same as none (Adam's momentum still moves): without any live trajectory all go backward.
    parts = [(False, [i for i in chosen if i not in set(live)]), (True, live)] if live else [(True, chosen)]
    result = []
    for grad, indices in parts:
        if indices:
            rows = plan([len(tokens[i]) for i in indices], world, learner.pack_tokens)[rank]
            result += [MicroBatch(pack([indices[j] for j in row], tokens, masks, fields), grad) for row in rows]
    return result


_FIELDS = ("behaviour", "advantage", "keep", "age", "scale", "temperature", "version", "clean_kv")


def _token_fields(member: Member, scale: float) -> dict[str, Array]:
    """Per-token columns [T] of a trajectory, in the order of its tokens; `pack` shifts them all alike."""
    log, n = member.trajectory.log, len(member.trajectory.log)
    return {
        "behaviour": log.logprobs,
        "advantage": np.full(n, member.advantage, dtype=np.float32),
        "keep": member.keep.astype(np.float32),
        "age": member.ages,
        "scale": np.full(n, scale, dtype=np.float32),
        "temperature": np.full(n, member.trajectory.temperature, dtype=np.float32),
        "version": log.versions,
        "clean_kv": (log.kv_versions == log.versions).astype(np.uint8),
    }


def batch_stats(members: Sequence[Member], found: GroupAdvantages) -> dict[str, float]:
    """What can be said of a whole batch without the model: returns, lengths, ages, masked tokens, outcomes, infos."""
    logs = [member.trajectory.log for member in members]
    rewards = [member.trajectory.reward for member in members]
    unfiltered = group_advantages(rewards, [m.trajectory.group for m in members], "dr_grpo")
    outcomes = [member.trajectory.outcome for member in members]
    trained = [m.ages[m.keep == 1] for m in members]
    refused = [
        np.flatnonzero((log.mask == 1) & (m.keep == 0)) / len(log) for log, m in zip(logs, members, strict=True) if m.valid
    ]
    positions = np.concatenate(refused) if refused else np.zeros(0)
    lengths = Lengths(
        generated=np.array([int(log.mask.sum()) for log in logs]),
        trained=np.array([len(t) for t in trained]),
        versions=np.array([len(np.unique(log.versions[m.keep == 1])) for log, m in zip(logs, members, strict=True)]),
    )
    none = np.zeros(0, dtype=int)
    return {
        "groups": float(unfiltered.groups),
        "groups_zero_variance": float(found.zero_variance),
        "groups_single_member": float(found.single_member),
        "reward_mean": float(np.mean(rewards)) if rewards else 0.0,
        "reward_std": unfiltered.reward_std,
        "trajectories_masked_outcome": float(sum(not m.valid for m in members)),
        "tokens_masked_outcome": float(sum(int(m.trajectory.log.mask.sum()) for m in members if not m.valid)),
        "tokens_masked_age": float(len(positions)),
        "masked_position_mean": float(positions.mean()) if len(positions) else 0.0,
        **age_diagnostics(
            np.concatenate([none, *(m.ages[m.trajectory.log.mask == 1] for m in members)]), np.concatenate([none, *trained])
        ),
        **length_diagnostics(lengths),
        **context_diagnostics(
            np.array([int(log.mask.argmax()) for log in logs if log.mask.any()]),
            np.array([len(log) for log in logs if log.mask.any()]),
        ),
        **{f"outcome_{outcome}": outcomes.count(outcome) / max(1, len(members)) for outcome in Outcome},
        **mean_info([member.trajectory.info for member in members]),
    }


def assemble(
    step: int,
    members: list[Member],
    found: GroupAdvantages,
    version_steps: dict[int, int],
    config: Config,
    rank: int,
    world: int,
) -> PreparedBatch:
    """Pack judged trajectories and count what the batch holds."""
    trained = np.concatenate([np.zeros(0, dtype=int), *(m.ages[m.keep == 1] for m in members)])
    return PreparedBatch(
        step=step,
        minibatches=arrange(members, step, config, rank, world),
        members=members,
        stats=batch_stats(members, found),
        ages=np.bincount(trained).tolist(),
        action_tokens=sum(int(m.trajectory.log.mask.sum()) for m in members if m.valid),
        version_steps=version_steps,
    )
