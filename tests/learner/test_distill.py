"""Distillation: learns demonstrated tokens and nothing else, and is the same every time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learner_data import tiny_llama

from learner.distill import distill
from learner.model import PackedModel
from learner.packing import pack
from segue.trajectory import Author, TokenLog, concat, context, sampled


def _demonstrations() -> list[TokenLog]:
    """After the prompt token p comes the action (p + 1, 2), then an observation of noise, then the action (p + 2, 2)."""
    rng = np.random.default_rng(0)
    logs = []
    for p in range(10, 20):
        parts = [context([1, p], Author.USER, -1), sampled([p + 1, 2], [0.0, 0.0], [0, 0], [0, 0], 0)]
        parts.append(context([int(t) for t in rng.integers(30, 60, 5)] + [p], Author.OBSERVATION, 0))
        parts.append(sampled([p + 2, 2], [0.0, 0.0], [0, 0], [0, 0], 1))
        logs.append(concat(parts))
    return logs


def test_it_learns_the_demonstrated_tokens_and_not_the_observations() -> None:
    model = PackedModel(tiny_llama(seed=1))
    logs = _demonstrations()
    calls: list[tuple[int, float]] = []
    losses = distill(model, logs, 60, 10, 1e-2, seed=0, pack_tokens=40, progress=lambda step, loss: calls.append((step, loss)))
    assert losses[-1] < 0.05 < losses[0]
    assert calls == [(i + 1, loss) for i, loss in enumerate(losses)]
    observed = [(log.mask == 0) & (np.arange(len(log)) >= 4) for log in logs]
    with torch.no_grad():
        seen, _ = model(pack(range(10), [log.tokens for log in logs], observed))
    assert float(-seen.mean()) > 2.0


def test_equal_seeds_give_equal_weights_whatever_the_packing_of_rows() -> None:
    def trained(seed: int, pack_tokens: int) -> list[torch.Tensor]:
        model = PackedModel(tiny_llama(seed=1))
        distill(model, _demonstrations(), 5, 4, 1e-2, seed=seed, pack_tokens=pack_tokens)
        return list(model.parameters())

    first, again, other, repacked = trained(3, 400), trained(3, 400), trained(4, 400), trained(3, 20)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for a, b in zip(first, repacked, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)


def test_nothing_demonstrated_is_an_error() -> None:
    with pytest.raises(ValueError, match="demonstrated"):
        distill(PackedModel(tiny_llama()), [context([1, 2], Author.USER, -1)], 1, 1, 1e-3)
