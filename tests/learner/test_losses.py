"""Corrections and losses: vectors of algorithms.md §9, numeric derivatives, loops, and combinations that must be refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from learner.corrections import decoupled_weight, importance_ratio, loglinear_proximal, masked_weight, truncated_weight
from learner.losses import ppo, proximal_logprobs, token_loss
from segue.config.learner import LearnerConfig
from segue.config.root import resolve
from segue.errors import UserError


def _log(*values: float) -> torch.Tensor:
    return torch.log(torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize(("ratio", "advantage", "expected"), [(1.5, 1, -1.28), (0.5, 1, -0.5), (0.5, -1, 0.8), (5, -1, 5)])
def test_clip_higher_vectors(ratio: float, advantage: float, expected: float) -> None:
    loss, _ = ppo(_log(ratio), torch.tensor([float(advantage)], dtype=torch.float64), 0.2, 0.28)
    assert loss.item() == pytest.approx(expected, abs=1e-5)


def test_clipped_is_where_the_gradient_is_cut() -> None:
    ratios = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 5.0], dtype=torch.float64).log()
    for sign in (1.0, -1.0):
        log_ratio = ratios.clone().requires_grad_()
        loss, clipped = ppo(log_ratio, torch.full((7,), sign, dtype=torch.float64), 0.2, 0.28)
        loss.sum().backward()
        assert log_ratio.grad is not None
        assert clipped.tolist() == (log_ratio.grad == 0).tolist()


def test_weight_vectors() -> None:
    rho = [0.4, 0.9, 1, 1.5, 6]
    b = torch.zeros(5, dtype=torch.float64)
    np.testing.assert_allclose(decoupled_weight(_log(*rho), b), rho, atol=1e-9)
    np.testing.assert_allclose(truncated_weight(_log(*rho), b, 2.0), [0.4, 0.9, 1, 1.5, 2], atol=1e-9)
    np.testing.assert_allclose(masked_weight(_log(*rho), b, 0.5, 5.0), [0, 0.9, 1, 1.5, 0], atol=1e-9)


def test_weights_are_clamped_in_the_log_and_never_infinite() -> None:
    assert importance_ratio(torch.tensor([1e4])).item() == pytest.approx(math.exp(20), rel=1e-6)
    assert importance_ratio(torch.tensor([-1e4])).item() == pytest.approx(math.exp(-20), rel=1e-6)


def test_loglinear_proximal_vectors() -> None:
    b, cur = torch.tensor([-2.0]), torch.tensor([-1.0])
    p = loglinear_proximal(b, cur, torch.tensor([3]))  # v = 3, k = 6
    assert p.item() == pytest.approx(-1.25)
    w, u = torch.exp(p - b).item(), torch.exp(cur - p).item()
    assert (w, u) == (pytest.approx(2.117, abs=1e-3), pytest.approx(1.284025, abs=1e-5))
    assert w * u == pytest.approx(math.e, rel=1e-6)
    zero, one = torch.zeros(3), torch.ones(3)
    assert loglinear_proximal(zero, one, torch.tensor([1, 0, -1])).tolist() == [0.5, 0.0, 0.0]  # α for v = 5, 6, 7
    assert not loglinear_proximal(zero, one.requires_grad_(), torch.tensor([1, 0, 1])).requires_grad


def _config(**extra: Any) -> LearnerConfig:
    return LearnerConfig(**extra)


def _tokens(seed: int = 0, n: int = 40) -> tuple[torch.Tensor, ...]:
    """l (with gradient), b, p, A, ages: far enough apart that both clip bounds are straddled."""
    g = torch.Generator().manual_seed(seed)
    cur = -torch.rand(n, generator=g, dtype=torch.float64) * 3
    b = cur + 0.6 * torch.randn(n, generator=g, dtype=torch.float64)
    p = cur + 0.3 * torch.randn(n, generator=g, dtype=torch.float64)
    return cur.requires_grad_(), b, p, torch.randn(n, generator=g, dtype=torch.float64), torch.randint(0, 4, (n,), generator=g)


@pytest.mark.parametrize("correction", ["decoupled", "tis", "mask", "none"])
def test_a_loop_agrees(correction: str) -> None:
    config = _config(correction=correction, mask_range=(0.5, 2.0))
    cur, b, p, advantage, _ = _tokens()
    result = token_loss(config, cur, b, advantage, None if correction == "none" else p)
    for t in range(len(cur)):
        lt, bt, pt, a = (float(x[t]) for x in (cur.detach(), b, p, advantage))
        old = bt if correction == "none" else pt
        rho = math.exp(pt - bt)
        w = {"none": 1.0, "decoupled": rho, "tis": min(rho, 2.0), "mask": rho if 0.5 <= rho <= 2.0 else 0.0}[correction]
        r = math.exp(lt - old)
        want = -w * min(r * a, min(max(r, 0.8), 1.28) * a)
        assert result.loss[t].item() == pytest.approx(want, rel=1e-9)
        assert result.weight[t].item() == pytest.approx(w, rel=1e-9)
        assert result.log_rho[t].item() == pytest.approx((lt if correction == "none" else pt) - bt, rel=1e-9)


def test_with_one_optimizer_step_the_gradient_is_the_weight_times_the_advantage() -> None:
    """p = sg(l): the ratio is 1, nothing clips; the numeric derivative of w·A·l with w held is w·A: weights carry no gradient."""
    for correction in ("decoupled", "tis"):
        config = _config(correction=correction)
        cur, b, _, advantage, ages = _tokens()
        p = proximal_logprobs(config, cur, b, ages, None)
        assert p is not None and not p.requires_grad and torch.equal(p, cur.detach())
        result = token_loss(config, cur, b, advantage, p)
        (grad,) = torch.autograd.grad(result.loss.sum(), cur)
        w = decoupled_weight(p, b) if correction == "decoupled" else truncated_weight(p, b, 2.0)
        step = 1e-6
        base, moved = (-(w * advantage * (cur.detach() + d)) for d in (-step, step))
        torch.testing.assert_close(grad, (moved - base) / (2 * step), atol=1e-7, rtol=1e-5)
        torch.testing.assert_close(grad, -w * advantage)


@pytest.mark.parametrize("correction", ["decoupled", "tis", "mask", "none"])
def test_numeric_derivative_of_the_loss_with_everything_else_held(correction: str) -> None:
    config = _config(correction=correction)
    cur, b, p, advantage, _ = _tokens(1)
    proximal = None if correction == "none" else p
    (grad,) = torch.autograd.grad(token_loss(config, cur, b, advantage, proximal).loss.sum(), cur)
    up, down = (token_loss(config, cur.detach() + d, b, advantage, proximal).loss for d in (1e-6, -1e-6))
    torch.testing.assert_close(grad, (up - down) / 2e-6, atol=1e-5, rtol=1e-4)


def test_the_weight_is_applied() -> None:
    """Perturbing b must change the gradient (AReaL's decoupled mode without its rejection block did not)."""
    config = _config()
    cur, b, _, advantage, ages = _tokens()

    def gradient(behaviour: torch.Tensor) -> torch.Tensor:
        loss = token_loss(config, cur, behaviour, advantage, proximal_logprobs(config, cur, behaviour, ages, None)).loss
        (grad,) = torch.autograd.grad(loss.sum(), cur)
        return grad

    assert not torch.allclose(gradient(b), gradient(b - 0.3), rtol=1e-3)


def test_which_policies_move_after_the_first_optimizer_step() -> None:
    """F13: with several steps per batch only l moves; b, the recomputed p and the weight stay."""
    config = _config(minibatches=2)
    cur, b, p, advantage, ages = _tokens()
    first = token_loss(config, cur, b, advantage, proximal_logprobs(config, cur, b, ages, p))
    moved = (cur.detach() + 0.1).requires_grad_()
    second = token_loss(config, moved, b, advantage, proximal_logprobs(config, moved, b, ages, p))
    assert torch.equal(first.weight, second.weight) and torch.equal(first.log_rho, second.log_rho)
    assert not torch.equal(first.loss, second.loss)
    log_linear = _config(minibatches=2, proximal="loglinear")
    p1, p2 = (proximal_logprobs(log_linear, x, b, ages, None) for x in (cur, moved))
    assert p1 is not None and p2 is not None
    torch.testing.assert_close(p2 - p1, 0.1 * ages.double() / (ages + 1.0))


def test_a_ratio_on_the_behaviour_policy_takes_no_weight() -> None:
    cur, b, p, advantage, _ = _tokens()
    with pytest.raises(AssertionError, match="takes no weight"):
        token_loss(_config(correction="none"), cur, b, advantage, p)


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        ({"correction": "mask", "mask_range": [1.5, 5.0]}, ["learner.mask_range = [1.5, 5]", "must hold 1"]),
        ({"proximal": "loglinear"}, ["learner.proximal = 'loglinear'", "minibatches"]),
        ({"proximal": "loglinear", "correction": "none", "minibatches": 2}, ["'loglinear'", "correction = 'none'"]),
        ({"aggregation": "constant"}, ["learner.constant_length"]),
        ({"minibatches": 99}, ["learner.minibatches = 99", "batch.groups"]),
    ],
)
def test_combinations_that_cannot_work_are_refused_at_start_up(learner: dict[str, Any], words: list[str]) -> None:
    """F17: no correction is silently switched off by another option."""
    data = {"steps": 1, "task": {"env": "latency"}, "model": {"path": "m"}, "learner": learner}
    with pytest.raises(UserError) as error:
        resolve(data, "x.toml")
    assert all(word in str(error.value) for word in words)
    assert str(error.value).count("\n") == 0
