"""A training step against a loop over trajectories and tokens; packing and micro-batches change nothing; promises hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from learner_data import batch_of, learner_config, prepare_batch, random_batch, tiny_llama
from transformers import LlamaForCausalLM

from learner.batches import MicroBatch, PreparedBatch, decode_batch, judge
from learner.model import POLICY, PackedModel
from learner.schedule import learning_rate
from learner.trainer import NotFinite, StepStats, Trainer
from segue.config import Config
from segue.ports.learner import Batch
from segue.trajectory import Author, TokenLog, concat, context, sampled


def trainer_at(config: Config, step: int = 3, lm: LlamaForCausalLM | None = None, double: bool = True) -> Trainer:
    lm = lm or tiny_llama(seed=1)
    return Trainer({POLICY: PackedModel(lm.double() if double else lm)}, config, step=step)


def gradients_of(
    trainer: Trainer, batch: PreparedBatch, version: int | None = None
) -> tuple[list[list[torch.Tensor]], StepStats]:
    """The gradients of every optimizer step of `batch`, before clipping, and the step's statistics."""
    seen: list[list[torch.Tensor]] = []
    optimize = trainer._optimize

    def spy() -> float:
        seen.append([p.grad.clone() for p in trainer.policy.parameters() if p.grad is not None])
        return optimize()

    trainer._optimize = spy  # type: ignore[method-assign]
    stats = trainer.train(batch, version)
    return seen, stats


# --- the loop: one trajectory, one token at a time, straight from algorithms.md -----------------------------------------


def naive_logprobs(lm: LlamaForCausalLM, log: TokenLog, temperature: float) -> torch.Tensor:
    """l of every token, [T]; entry 0 is 0."""
    logits = lm(input_ids=torch.from_numpy(log.tokens).long()[None], use_cache=False).logits[0]
    every = torch.log_softmax(logits / temperature, -1)
    return torch.stack([torch.zeros((), dtype=every.dtype)] + [every[t - 1, log.tokens[t]] for t in range(1, len(log))])


def naive_loss(lm: LlamaForCausalLM, batch: Batch, config: Config, frozen: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
    """The loss of one optimizer step over the whole batch; `frozen` are log-probs of the proximal policy, else p = sg(l)."""
    trajectories = decode_batch(batch)
    members, _ = judge(trajectories, batch.step, batch.version_steps, config)
    learner = config.learner
    total = torch.zeros((), dtype=torch.float64)
    n = len(trajectories)
    tokens = sum(int(t.log.mask.sum()) for t in trajectories)
    for i, (trajectory, member) in enumerate(zip(trajectories, members, strict=True)):
        log = trajectory.log
        cur = naive_logprobs(lm, log, trajectory.temperature)
        for t in range(len(log)):
            if not log.mask[t]:
                continue
            age = batch.step - batch.version_steps[int(log.versions[t])]
            if age > config.staleness.max_age and config.staleness.over_age == "mask":
                continue
            b = float(log.logprobs[t])
            if learner.correction == "none":
                old, w = b, 1.0
            else:
                old = float(cur[t].detach()) if frozen is None else float(frozen[i][t])
                if learner.proximal == "loglinear" and learner.minibatches > 1:
                    old = b + age / (age + 1) * (float(cur[t].detach()) - b)
                w = math.exp(old - b)
                w = min(w, learner.weight_cap) if learner.correction == "tis" else w
                low, high = learner.mask_range
                w = 0.0 if learner.correction == "mask" and not low <= w <= high else w
            r = torch.exp(cur[t] - old)
            a = member.advantage
            loss = -w * torch.minimum(r * a, r.clamp(1 - learner.clip_low, 1 + learner.clip_high) * a)
            share = {
                "token": 1 / tokens,
                "trajectory": 1 / (n * int(log.mask.sum())),
                "constant": 1 / (n * max(1, learner.constant_length)),
            }[learner.aggregation]
            total = total + loss * share
    return total


@pytest.mark.parametrize(
    "learner",
    [
        {},
        {"aggregation": "token"},
        {"aggregation": "constant", "constant_length": 20},
        {"correction": "tis", "advantage": "rloo"},
        {"correction": "mask", "mask_range": [0.8, 1.1]},
        {"correction": "none", "advantage": "dr_grpo", "aggregation": "token"},
    ],
)
def test_loss_and_gradient_equal_the_loop(learner: dict[str, Any]) -> None:
    config = learner_config(learner={"pack_tokens": 64, **learner}, staleness={"max_age": 2})
    batch = random_batch(seed=2, temperature=0.7)
    lm = tiny_llama(seed=1).double()
    want = naive_loss(lm, batch, config)
    expected = torch.autograd.grad(want, list(lm.parameters()))
    trainer = trainer_at(config)
    (got,), stats = gradients_of(trainer, prepare_batch(batch, config))
    assert stats.stats["loss"] == pytest.approx(float(want.detach()), rel=1e-5)
    assert stats.stats["tokens_masked_age"] > 0
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize(
    "learner",
    [{}, {"proximal": "loglinear"}, {"correction": "tis", "weight_cap": 1.1}, {"correction": "mask", "mask_range": [0.8, 1.1]}],
)
def test_two_optimizer_steps_equal_the_loop(learner: dict[str, Any]) -> None:
    """Each step has denominators of its own; the recomputed p is that of the weights before the first."""
    config = learner_config(learner={"minibatches": 2, "lr": 0.05, **learner})
    batch = random_batch(seed=4, groups=4)
    prepared = prepare_batch(batch, config)
    parts = [
        sorted({prepared.members[int(i)].trajectory.group for micro in micros for i in micro.row.sequence})
        for micros in prepared.minibatches
    ]
    trainer = trainer_at(config)
    before = trainer_at(config).policy.lm
    (first, second), stats = gradients_of(trainer, prepared)
    assert stats.stats["optimizer_steps"] == 2

    def part_of(groups: list[int]) -> Batch:
        return Batch(batch.step, [g for g in batch.groups if g.group in groups], batch.version_steps)

    one = part_of(parts[0])
    for a, b in zip(first, torch.autograd.grad(naive_loss(before, one, config), list(before.parameters())), strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-4)
    # The weights after the first step, made by the same optimizer on the gradient that was just found right.
    moved = trainer_at(config)
    for parameter, grad in zip(moved.policy.parameters(), first, strict=True):
        parameter.grad = grad.clone()
    moved._optimize()
    two = part_of(parts[1])
    with torch.no_grad():
        frozen = [naive_logprobs(before, t.log, t.temperature) for t in decode_batch(two)]
    lm = moved.policy.lm
    expected = torch.autograd.grad(naive_loss(lm, two, config, frozen), list(lm.parameters()))
    for a, b in zip(second, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-3)


def test_packing_never_changes_loss_or_gradient() -> None:
    """F15."""
    results = []
    for pack_tokens in (64, 100, 4096):
        config = learner_config(learner={"pack_tokens": pack_tokens})
        results.append(gradients_of(trainer_at(config), prepare_batch(random_batch(seed=5), config)))
    for (grads,), stats in results[1:]:
        assert {k: pytest.approx(v, rel=1e-5, abs=1e-9, nan_ok=True) for k, v in results[0][1].stats.items()} == stats.stats
        for a, b in zip(grads, results[0][0][0], strict=True):
            torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-5)


def test_observations_after_the_last_action_change_nothing() -> None:
    """Masked tokens are in no sum, denominator, sequence product or metric."""
    config = learner_config()
    short = random_batch(seed=7)
    members = [
        [(concat([t.log, context([9] * 11, Author.OBSERVATION, t.log.segments[-1].turn)]), t.turn_rewards) for t in group]
        for group in (decode_batch(Batch(short.step, [g], short.version_steps)) for g in short.groups)
    ]
    long = batch_of(members, short.step, short.version_steps)
    (one,), stats = gradients_of(trainer_at(config), prepare_batch(short, config))
    (two,), padded = gradients_of(trainer_at(config), prepare_batch(long, config))
    lengths = {name for name in stats.stats if name.startswith("after_prompt_tokens")}  # of contexts: they did grow
    assert {name: padded.stats[name] - stats.stats[name] for name in sorted(lengths)}["after_prompt_tokens"] == pytest.approx(11)
    kept, same = ({k: v for k, v in found.items() if k not in lengths} for found in (padded.stats, stats.stats))
    assert kept == pytest.approx(same, rel=1e-5, abs=1e-9, nan_ok=True)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-5)


def test_leaving_out_backward_passes_that_are_zero_changes_nothing() -> None:
    rng_batch = random_batch(seed=6, groups=4)
    config = learner_config()
    prepared = prepare_batch(rng_batch, config)
    assert {micro.grad for micro in prepared.minibatches[0]} == {True, False}
    all_backward = PreparedBatch(
        **{**prepared.__dict__, "minibatches": [[MicroBatch(m.row, True) for m in micros] for micros in prepared.minibatches]}
    )
    (some,), stats = gradients_of(trainer_at(config), prepared)
    (every,), all_stats = gradients_of(trainer_at(config), all_backward)
    assert stats.stats == pytest.approx(all_stats.stats, rel=0, abs=0, nan_ok=True)
    for a, b in zip(some, every, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)


def _simple(versions: list[int], logprobs: list[float] | None = None, kv: list[int] | None = None) -> TokenLog:
    n = len(versions)
    actions = sampled(list(range(20, 20 + n)), logprobs or [-1.0] * n, versions, kv or versions, 0)
    return concat([context([5, 6, 7], Author.USER, -1), actions])


def test_a_batch_without_anything_to_train_leaves_the_weights_and_is_finite() -> None:
    """Fully masked: loss 0, finite gradients, no NaN from empty denominators."""
    config = learner_config(staleness={"max_age": 1})
    batch = batch_of([[(_simple([0, 0]), [1.0]), (_simple([0]), [0.0])]], step=5, version_steps={0: 0})
    trainer = trainer_at(config, step=5)
    before = [p.clone() for p in trainer.policy.parameters()]
    (grads,), stats = gradients_of(trainer, prepare_batch(batch, config))
    assert stats.stats["loss"] == 0.0 and stats.stats["grad_norm"] == 0.0 and stats.ages == []
    assert stats.stats["kept_fraction"] == 0.0
    assert all(float(g.abs().max()) == 0.0 for g in grads)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters(), strict=True))
    assert trainer.step == 6


def test_train_inference_gap_is_numerics_at_equal_version_and_temperature() -> None:
    """F16: log-probs of temperature 0.7 recomputed at 0.7. Other versions and kept KV are not compared."""
    lm = tiny_llama(seed=1)
    ids = _simple([4, 4, 4, 4])
    with torch.no_grad():
        own = [float(x) for x in naive_logprobs(lm, ids, 0.7)[3:]]
    off = [own[0], own[1], own[2] - 3.0, own[3] - 3.0]
    log = _simple([4, 4, 3, 4], off, kv=[4, 4, 3, 3])
    batch = batch_of([[(log, [1.0]), (_simple([4], [own[0]]), [0.0])]], step=3, version_steps={3: 2, 4: 3}, temperature=0.7)
    config = learner_config()
    stats = trainer_at(config, lm=lm, double=False).train(prepare_batch(batch, config), version=4).stats
    assert stats["logprob_gap_tokens"] == 3
    assert stats["logprob_gap_max"] < 1e-4
    batch = batch_of([[(log, [1.0]), (_simple([4], [own[0]]), [0.0])]], step=3, version_steps={3: 2, 4: 3}, temperature=1.0)
    raw = trainer_at(config, lm=lm, double=False).train(prepare_batch(batch, config), version=4).stats
    assert raw["logprob_gap_mean"] > 1e-2  # another temperature than the sampling one shows


def test_batches_train_in_order_and_within_age() -> None:
    """Promise 2, asserted where it counts."""
    config = learner_config()
    prepared = prepare_batch(random_batch(), config)
    with pytest.raises(AssertionError, match="the batch of step 3 came at step 2"):
        trainer_at(config, step=2).train(prepared)
    over = PreparedBatch(**{**prepared.__dict__, "ages": [0, 0, 0, 0, 0, 3]})
    with pytest.raises(AssertionError, match="tokens of age 5"):
        trainer_at(config).train(over)
    trainer_at(learner_config(staleness={"over_age": "train"})).train(over)


def test_a_gradient_that_is_not_finite_is_refused_before_it_touches_the_weights() -> None:
    config = learner_config()
    trainer = trainer_at(config)
    prepared = prepare_batch(random_batch(), config)
    live = next(m for m in prepared.minibatches[0] if m.grad)
    live.row.fields["advantage"][0] = float("inf")
    before = [p.clone() for p in trainer.policy.parameters()]
    with pytest.raises(NotFinite, match="gradient norm of step 3 is"):
        trainer.train(prepared)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters(), strict=True))


def test_training_raises_the_probability_of_what_was_rewarded() -> None:
    config = learner_config(learner={"lr": 1e-2, "pack_tokens": 64}, steps=30)
    lm = tiny_llama(seed=2)
    good, bad = 40, 41
    trainer = trainer_at(config, step=0, lm=lm, double=False)

    def probability(token: int) -> float:
        with torch.no_grad():
            return float(torch.softmax(trainer.policy.lm(torch.tensor([[5, 6, 7]])).logits[0, -1], -1)[token])

    start = probability(good)
    for step in range(15):
        members = []
        for token, reward in ((good, 1.0), (bad, 0.0)):
            b = math.log(probability(token))
            members.append((concat([context([5, 6, 7], Author.USER, -1), sampled([token], [b], [step], [step], 0)]), [reward]))
        stats = trainer.train(prepare_batch(batch_of([members], step, {step: step}), config), version=step)
        assert stats.stats["ess_token"] == pytest.approx(1.0, abs=1e-3)
    assert probability(good) > max(0.5, start) and probability(good) > 5 * probability(bad)


def test_phases_and_rate_are_reported() -> None:
    config = learner_config(learner={"lr_schedule": "linear", "lr": 1.0}, steps=10)
    phases: list[str] = []
    stats = trainer_at(config).train(prepare_batch(random_batch(), config), enter=phases.append)
    assert phases == ["proximal", "forward_backward", "optimizer"]
    assert set(stats.seconds) == {*phases, "forward", "backward"} and all(s >= 0 for s in stats.seconds.values())
    assert stats.stats["learning_rate"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1 / 3, 2 / 3, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rate_schedules(kind: str, expected: list[float]) -> None:
    config = learner_config(learner={"lr": 1.0, "lr_schedule": kind, "warmup_steps": 2}).learner
    np.testing.assert_allclose([learning_rate(config, step, 6) for step in range(6)], expected, atol=1e-6)
