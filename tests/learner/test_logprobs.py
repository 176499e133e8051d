"""Chunked log-probabilities: equal to the naive ones in value and gradient, at the sampling temperature, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.logprobs import chunked_logprobs


@pytest.mark.parametrize("chunk", [1, 4, 7, 16, 17, 100])
def test_chunks_equal_the_naive_computation(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(17, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(30, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 30, (17,), generator=generator)
    temperature = torch.rand(17, generator=generator) + 0.5
    upstream = torch.randn(17, generator=generator)

    logprobs, entropies = chunked_logprobs(hidden, targets, temperature, lambda h: h @ weight.T, chunk)
    grads = torch.autograd.grad((logprobs * upstream).sum(), [hidden, weight])

    z = (hidden @ weight.T) / temperature[:, None]
    every = torch.log_softmax(z, -1)
    naive = every[torch.arange(17), targets]
    expected = torch.autograd.grad((naive * upstream).sum(), [hidden, weight])
    torch.testing.assert_close(logprobs.double(), naive, atol=1e-5, rtol=0)
    # logsumexp z − Σ softmax(z)·z, the form of algorithms.md §6
    torch.testing.assert_close(entropies.double(), torch.logsumexp(z, -1) - (every.exp() * z).sum(-1), atol=1e-5, rtol=0)
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert not entropies.requires_grad
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_a_loop_over_tokens_in_numpy_agrees() -> None:
    rng = np.random.default_rng(0)
    hidden, weight = rng.normal(size=(9, 4)), rng.normal(size=(11, 4))
    targets, temperature = rng.integers(0, 11, 9), rng.uniform(0.3, 2.0, 9)
    logprobs, entropies = chunked_logprobs(
        torch.from_numpy(hidden),
        torch.from_numpy(targets),
        torch.from_numpy(temperature),
        lambda h: h @ torch.from_numpy(weight).T,
        4,
    )
    for t in range(9):
        z = [float(hidden[t] @ weight[v]) / temperature[t] for v in range(11)]
        total = sum(np.exp(x) for x in z)
        probabilities = [np.exp(x) / total for x in z]
        assert logprobs[t] == pytest.approx(np.log(probabilities[targets[t]]), abs=1e-5)
        assert entropies[t] == pytest.approx(-sum(p * np.log(p) for p in probabilities), abs=1e-5)


def test_never_more_logits_than_one_chunk() -> None:
    seen: list[int] = []
    weight = torch.randn(50, 4, requires_grad=True)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return hidden @ weight.T

    saved: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = chunked_logprobs(torch.randn(64, 4), torch.zeros(64, dtype=torch.long), torch.ones(64), head, 16)
    logprobs.sum().backward()
    assert seen == [16] * 8  # four chunks, each once more in the backward pass
    assert max(saved, default=0) < 16 * 50  # nothing of logits' size waits for the backward pass


def test_impossible_vocabulary_entries_do_not_make_the_entropy_nan() -> None:
    logits = torch.tensor([[0.0, 0.0, -float("inf")]])
    _, entropy = chunked_logprobs(torch.zeros(1, 1), torch.tensor([0]), torch.ones(1), lambda h: logits, 8)
    assert float(entropy[0]) == pytest.approx(np.log(2))
