"""Noise and inverse-CDF sampling against loops that do it one number at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.embedded.sampler import sample, stream_of, uniform

M = (1 << 64) - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M
    return x ^ (x >> 31)


def uniforms(seed: int, offset: int, count: int) -> list[float]:
    stream = stream_of(seed)
    return [uniform(stream, number) for number in range(offset, offset + count)]


def splitmix64(state: int, count: int) -> list[int]:
    """The generator as published: advance by the golden gamma, then mix."""
    out = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & M
        out.append(mix(state))
    return out


def test_the_stream_is_splitmix64() -> None:
    # first outputs from state 0, as every implementation gives them
    assert splitmix64(0, 2) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    for seed in (0, 1, 12345, 2**63, -7):
        expected = [((x >> 32) + 0.5) * 2.0**-32 for x in splitmix64(mix(seed & M), 20)]
        assert uniforms(seed, 0, 20) == expected


@given(seed=st.integers(0, 2**63), number=st.integers(0, 10**6))
def test_every_number_lies_between_0_and_1(seed: int, number: int) -> None:
    assert 0.0 < uniform(stream_of(seed), number) < 1.0


def test_streams_of_neighbouring_seeds_are_unlike() -> None:
    table = np.array([uniforms(seed, 0, 500) for seed in range(40)])
    assert abs(table.mean() - 0.5) < 0.01 and abs(table.var() - 1 / 12) < 0.002
    correlations = np.corrcoef(table) - np.eye(40)
    assert np.abs(correlations).max() < 0.25  # 5 σ of 500 samples


def slow_sample(logits: np.ndarray, temperature: float, u: float) -> tuple[int, float]:
    """Walk along the distribution until the sum passes u."""
    if temperature == 0.0:
        token = max(range(len(logits)), key=lambda i: (logits[i], -i))
        temperature = 1.0
    else:
        token = -1
    top = max(x / temperature for x in logits)
    weights = [math.exp(x / temperature - top) for x in logits]
    total = sum(weights)
    if token < 0:
        passed = 0.0
        while passed <= u and token < len(weights) - 1:
            token += 1
            passed += weights[token] / total
    return token, math.log(weights[token] / total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sampling_is_a_walk_along_the_distribution(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn((200, 37), generator=generator) * 3).to(dtype)
    heats = [(0.0, 0.5, 1.0, 1.7)[i % 4] for i in range(200)]
    noise = [uniforms(i, 0, 1)[0] for i in range(200)]
    tokens, logprobs = sample(
        logits,
        torch.tensor([h or 1.0 for h in heats])[:, None],
        torch.tensor([h == 0.0 for h in heats]),
        torch.tensor(noise, dtype=torch.float64),
    )
    for row in range(200):
        token, logprob = slow_sample(logits[row].double().numpy(), heats[row], noise[row])
        assert int(tokens[row]) == token
        assert float(logprobs[row]) == pytest.approx(logprob, abs=2e-5)


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -30.0]])
    probabilities = torch.softmax(logits / 0.8, -1)[0].tolist()
    n = 20_000
    tokens, _ = sample(logits.expand(n, -1), torch.full((n, 1), 0.8), None, torch.tensor(uniforms(3, 0, n), dtype=torch.float64))
    counts = torch.bincount(tokens, minlength=5).tolist()
    chi = sum((c - n * p) ** 2 / (n * p) for c, p in zip(counts[:4], probabilities[:4], strict=True))
    assert chi < 21.1  # χ² of 3 degrees of freedom, 1 in 10,000
    assert counts[4] == 0


def test_a_token_without_probability_is_never_taken() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(4, -1)
    edges = torch.tensor([2.0**-33, 0.5 - 2.0**-33, 0.5, 1 - 2.0**-33], dtype=torch.float64)
    tokens, logprobs = sample(logits, None, None, edges)
    assert tokens.tolist() == [1, 1, 3, 3]
    assert torch.allclose(logprobs, torch.tensor(0.5).log())


def test_a_large_vocabulary_keeps_its_tail() -> None:
    """In float32 the sums of 200,000 equal probabilities drift by more than the share of many tokens."""
    size = 200_000
    noise = [0.1, 0.5, 0.9, 1 - 2.0**-33]
    tokens, _ = sample(torch.zeros((4, size)), None, None, torch.tensor(noise, dtype=torch.float64))
    for token, u in zip(tokens.tolist(), noise, strict=True):
        assert abs(token - int(u * size)) <= 1


def test_half_precision_is_sampled_in_float32() -> None:
    logits = torch.randn((5, 50), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    _, logprobs = sample(logits, None, None, torch.full((5,), 0.3, dtype=torch.float64))
    assert logprobs.dtype == torch.float32
