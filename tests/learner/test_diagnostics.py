"""Each diagnostic against its written definition, on hand-made batches (F85), alone and over ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from learner.diagnostics import (
    Lengths,
    TokenRecord,
    age_diagnostics,
    context_diagnostics,
    effective_sample_size,
    length_diagnostics,
    mean_info,
    sequence_log_weights,
    token_diagnostics,
)

RHO = np.array([0.4, 0.9, 1, 1.5, 6])
Array = np.ndarray[Any, Any]


def _record(log_rho: Array, **extra: Any) -> TokenRecord:
    n = len(log_rho)
    values: dict[str, Any] = {
        "log_rho": log_rho,
        "delta": log_rho,
        "entropy": np.ones(n),
        "clipped": np.zeros(n),
        "kept": np.ones(n),
        "comparable": np.zeros(n),
        "gap": np.zeros(n),
        "sequence": np.zeros(n, dtype=int),
    }
    return TokenRecord(**{**values, **extra})


class TwoRanks:
    """Reduces this rank's array with that of a second rank, whose calls are recorded beforehand in the same order."""

    def __init__(self, other: list[Array] | None = None) -> None:
        self.seen: list[Array] = []
        self._other = other

    def _pair(self, values: Array) -> Array:
        self.seen.append(values.copy())
        return values if self._other is None else self._other[len(self.seen) - 1]

    def sum(self, values: Array) -> Array:
        other = self._pair(values)
        return values if self._other is None else values + other

    def max(self, values: Array) -> Array:
        return np.maximum(values, self._pair(values))


def test_ess_vectors_before_truncation() -> None:
    """F87: the raw figure. After TIS it would be .818491, after IcePop .569458: both too good."""
    assert effective_sample_size(np.log(RHO)) == pytest.approx(0.477573, abs=1e-5)
    assert effective_sample_size(np.log(np.minimum(RHO, 2))) == pytest.approx(0.818491, abs=1e-5)
    assert token_diagnostics([_record(np.log(RHO))])["ess_token"] == pytest.approx(0.477573, abs=1e-5)


def test_ess_of_a_batch_that_is_split_over_micro_batches_is_the_same() -> None:
    parts = [_record(np.log(RHO[:2])), _record(np.log(RHO[2:]), sequence=np.ones(3, dtype=int))]
    assert token_diagnostics(parts)["ess_token"] == pytest.approx(0.477573, abs=1e-5)


def test_ess_stands_extreme_weights() -> None:
    assert effective_sample_size(np.full(10, 700.0)) == pytest.approx(1.0)
    assert effective_sample_size(np.array([20.0, -700.0])) == pytest.approx(0.5)
    assert math.isnan(effective_sample_size(np.zeros(0)))


def test_sequence_ess_multiplies_within_trajectories_and_clamps_the_sum() -> None:
    logs = np.log(np.array([2.0, 3.0, 0.5]))
    found = sequence_log_weights(logs, np.array([4, 4, 9]))
    np.testing.assert_allclose(np.exp(found), [6.0, 0.5])
    w = np.array([6.0, 0.5])
    record = _record(logs, sequence=np.array([4, 4, 9]))
    assert token_diagnostics([record])["ess_sequence"] == pytest.approx(w.sum() ** 2 / (2 * (w**2).sum()))
    # 1000 tokens of log ρ = .1: the sum is clamped to 20 (weight e²⁰), the tokens are not.
    long = sequence_log_weights(np.full(1000, 0.1), np.zeros(1000, dtype=int))
    assert long[0] == pytest.approx(100.0)
    assert effective_sample_size(np.array([100.0, 20.0])) == pytest.approx(1.0)


def test_product_vector() -> None:
    assert math.exp(sequence_log_weights(np.log(RHO), np.zeros(5, dtype=int))[0]) == pytest.approx(3.24)


def test_length_trap_vectors() -> None:
    for n, expected in ((100, 2.7048), (1000, 20959)):
        found = sequence_log_weights(np.full(n, math.log(1.01)), np.zeros(n, dtype=int))[0]
        assert math.exp(found) == pytest.approx(expected, rel=1e-4)


def test_kl_vectors() -> None:
    stats = token_diagnostics([_record(np.log(RHO))])
    assert stats["kl_k1"] == pytest.approx(-0.235115, abs=1e-5)
    assert stats["kl_k2"] == pytest.approx(0.422549, abs=1e-5)
    assert stats["kl_k3"] == pytest.approx(0.724885, abs=1e-5)


def test_fractions_and_gap_on_a_hand_made_batch() -> None:
    records = [
        _record(
            np.zeros(2), clipped=np.array([1, 0]), kept=np.array([1, 0]), comparable=np.array([1, 0]), gap=np.array([0.01, 9.0])
        ),
        _record(np.zeros(2), entropy=np.array([3.0, 1.0]), comparable=np.array([0, 1]), gap=np.array([9.0, -0.03])),
    ]
    stats = token_diagnostics(records)
    assert stats["action_tokens"] == 4
    assert stats["clip_fraction"] == 0.25
    assert stats["kept_fraction"] == 0.75
    assert stats["entropy"] == 1.5
    assert stats["logprob_gap_tokens"] == 2  # kept KV and other versions (the 9.0s) are not compared
    assert stats["logprob_gap_mean"] == pytest.approx(0.02)
    assert stats["logprob_gap_max"] == pytest.approx(0.03)
    assert stats["ess_token"] == 1.0


def test_ranks_reduce_sums_before_dividing() -> None:
    rng = np.random.default_rng(0)
    one, two = (
        _record(rng.normal(size=n), entropy=rng.random(n), comparable=rng.integers(0, 2, n), gap=rng.normal(size=n))
        for n in (3, 11)
    )
    alone = token_diagnostics([one, _shifted(two)])
    # Two passes, because what a rank contributes to the later sums depends on the maximum of all.
    first = TwoRanks()
    token_diagnostics([_shifted(two)], first)
    other: list[Array] = first.seen
    for _ in range(3):
        mine = TwoRanks(other)
        token_diagnostics([one], mine)
        theirs = TwoRanks(mine.seen)
        token_diagnostics([_shifted(two)], theirs)
        other = theirs.seen
    split = token_diagnostics([one], TwoRanks(other))
    for name, value in alone.items():
        assert split[name] == pytest.approx(value, rel=1e-12), name


def _shifted(record: TokenRecord) -> TokenRecord:
    return TokenRecord(**{**record.__dict__, "sequence": record.sequence + 100})


def test_no_sampled_token_is_not_a_crash() -> None:
    for stats in (token_diagnostics([]), token_diagnostics([_record(np.zeros(0))])):
        assert stats["action_tokens"] == 0 and math.isnan(stats["ess_token"]) and math.isnan(stats["logprob_gap_max"])


def test_lengths_generated_against_trained() -> None:
    stats = length_diagnostics(Lengths(np.array([10, 20, 30, 0]), np.array([10, 0, 5, 0]), np.array([1, 0, 3, 0])))
    assert stats["length_generated"] == 15
    assert stats["length_trained"] == 7.5
    assert stats["length_ratio"] == 0.5
    assert stats["trajectories"] == 4 and stats["trajectories_trained"] == 2
    assert stats["trajectories_kept_fraction"] == pytest.approx(2 / 3)
    assert stats["trajectories_multi_version"] == 1


def test_contexts_are_described_by_prompt_and_moments_of_the_rest() -> None:
    stats = context_diagnostics(np.array([3, 5]), np.array([13, 35]))
    assert stats == {"prompt_tokens": 4.0, "after_prompt_tokens": 20.0, "after_prompt_tokens_squared": 500.0}
    assert set(context_diagnostics(np.zeros(0, int), np.zeros(0, int)).values()) == {0.0}


def test_over_age_masking_shows_in_the_length_ratio_on_a_heavy_tail() -> None:
    rng = np.random.default_rng(0)
    lengths = (rng.pareto(1.5, 2000) * 40 + 10).astype(int)
    trained = np.where(lengths > 200, 0, lengths)  # long episodes are the old ones
    assert length_diagnostics(Lengths(lengths, trained, np.ones(2000)))["length_ratio"] < 0.9
    assert length_diagnostics(Lengths(lengths, lengths, np.ones(2000)))["length_ratio"] == 1.0


def test_ages_generated_and_trained() -> None:
    stats = age_diagnostics(np.array([0, 1, 5, 2]), np.array([0, 1, 2]))
    assert stats["age_generated_mean"] == 2.0 and stats["age_generated_max"] == 5.0
    assert stats["age_trained_mean"] == 1.0 and stats["age_trained_max"] == 2.0
    assert (stats["tokens_generated"], stats["tokens_trained"]) == (4, 3)


def test_infos_average_over_those_that_reported() -> None:
    assert mean_info([{"success": 1.0}, {"success": 0.0, "format": 0.5}]) == {"info_format": 0.5, "info_success": 0.5}
