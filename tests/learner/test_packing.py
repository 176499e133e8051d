"""Packing: exact against the unpacked forward pass on many architectures, balanced, and shifted in one place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_data import tiny_llama, tiny_lm

from learner.model import PackedModel, wrap_model
from learner.packing import pack, plan
from segue.errors import UserError

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen3": {},
    "gemma2": {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {},
    "gpt_neox": {},
    "olmo2": {},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    "granite": {"logits_scaling": 3.0},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "sliding_window": 5},
    "mixtral": {"num_local_experts": 2},
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_packed_rows_equal_the_unpacked_forward_pass(kind: str) -> None:
    lm = tiny_lm(kind, **ARCHITECTURES[kind])
    if "num_local_experts" not in ARCHITECTURES[kind]:  # torch multiplies grouped experts in single precision only
        lm = lm.double()
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 60, n).astype(np.int32) for n in (7, 1, 19, 12, 2)]
    masks = [(np.arange(len(t)) > 0) & (rng.random(len(t)) < 0.7) for t in texts]
    expected = []
    with torch.no_grad():
        for ids, mask in zip(texts, masks, strict=True):
            logits = lm(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0]
            every = torch.log_softmax(logits.float(), -1)
            expected.append(torch.stack([every[t - 1, ids[t]] for t in np.flatnonzero(mask)] or [torch.zeros(0)]).reshape(-1))
        model = wrap_model(lm, kind)
        got, _ = model(pack([0, 1, 2, 3, 4], texts, masks))
    torch.testing.assert_close(got, torch.cat(expected), atol=2e-5, rtol=0)


def test_packed_gradients_equal_those_of_single_trajectories() -> None:
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, 60, n).astype(np.int32) for n in (9, 5, 16)]
    masks = [np.arange(len(t)) >= 3 for t in texts]
    model = PackedModel(tiny_llama(seed=3).double())

    def gradients(rows: list[list[int]]) -> list[torch.Tensor]:
        model.zero_grad()
        for indices in rows:
            model(pack(indices, texts, masks))[0].sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for together, alone in zip(gradients([[0, 1, 2]]), gradients([[2], [0], [1]]), strict=True):
        torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)


def test_a_model_whose_attention_cannot_be_packed_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"FalconForCausalLM.*cannot be trained packed"):
        wrap_model(tiny_lm("falcon"), "some/folder")


def test_a_first_token_that_was_sampled_is_refused() -> None:
    with pytest.raises(ValueError, match="starts with a sampled token"):
        pack([0], [np.array([5, 6])], [np.array([1, 1])])


def test_a_field_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="advantage has 1 entries for 2 tokens"):
        pack([0], [np.array([5, 6])], [np.array([0, 1])], {"advantage": [np.zeros(1)]})


def test_every_field_shifts_alike_on_trajectories_ending_in_an_action_and_in_an_observation() -> None:
    # S3 A2 O4 A2 and S3 A2 O4 A2 O2 (algorithms.md §9, ex 6): `m[1:]` is right, `m[:-1]` wrong, although the sums may agree.
    ends_a = np.array([0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1])
    ends_o = np.concatenate([ends_a, [0, 0]])
    tokens = [np.arange(100, 111), np.arange(200, 213)]
    own = [np.arange(11) * 1.0, np.arange(13) * 1.0 + 50]
    row = pack([0, 1], tokens, [ends_a, ends_o], {"own": own})
    assert row.source.tolist() == [2, 3, 8, 9, 13, 14, 19, 20]
    assert row.targets.tolist() == [103, 104, 109, 110, 203, 204, 209, 210]
    assert row.fields["own"].tolist() == [3, 4, 9, 10, 53, 54, 59, 60]
    assert row.sequence.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert row.positions.tolist() == [*range(11), *range(13)]
    assert row.tokens[row.source + 1].tolist() == row.targets.tolist()


@given(
    lengths=st.lists(st.integers(1, 50), max_size=40),
    ranks=st.integers(1, 4),
    row_tokens=st.integers(10, 120),
)
def test_a_plan_holds_every_trajectory_once_and_pairs_the_ranks_rows(lengths: list[int], ranks: int, row_tokens: int) -> None:
    result = plan(lengths, ranks, row_tokens)
    assert len(result) == ranks
    assert len({len(rows) for rows in result}) == 1
    assert sorted(i for rows in result for row in rows for i in row) == list(range(len(lengths)))
    for rows in result:
        for row in rows:
            assert len(row) <= 1 or sum(lengths[i] for i in row) <= row_tokens


def test_a_plan_balances_ranks_and_turns() -> None:
    lengths = [int(n) for n in np.random.default_rng(0).integers(50, 400, 128)]
    result = plan(lengths, 4, 4096)
    loads = np.array([[sum(lengths[i] for i in row) for row in rows] for rows in result])
    assert loads.sum(axis=1).max() <= 1.05 * loads.sum(axis=1).min()
    assert (loads.max(axis=0) <= 1.1 * loads.min(axis=0)).all()


def test_a_row_without_sampled_tokens_has_zero_loss_and_finite_gradients() -> None:
    model = PackedModel(tiny_llama())
    for row in (pack([], [], [], {"temperature": []}), pack([0], [np.array([3, 4, 5])], [np.zeros(3)])):
        model.zero_grad()
        logprobs, entropies = model(row)
        assert logprobs.shape == entropies.shape == (0,)
        loss = logprobs.sum()
        loss.backward()
        assert loss.item() == 0.0
        assert all(p.grad is not None and float(p.grad.abs().max()) == 0.0 for p in model.parameters())
