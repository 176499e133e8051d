"""Fitting staged weights: tied names, precisions, and every way of not fitting."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from engine_models import Staged, named, tiny

from rollout.fitting import Bindings, bind


def put(bindings: Bindings) -> None:
    for target, source in bindings:
        target.copy_(source)


def ids(model: Any) -> list[float]:
    logits: list[float] = model(input_ids=torch.tensor([[3, 1, 4, 1, 5]])).logits.flatten().tolist()
    return logits


@pytest.mark.parametrize("aliases", [False, True])
@pytest.mark.parametrize("dropped", [None, "lm_head.weight", "model.embed_tokens.weight"])
def test_tied_embeddings_come_under_either_name_or_both(aliases: bool, dropped: str | None) -> None:
    """F37: whichever name carries them, head and embedding are new together."""
    old, new = (tiny(seed, tie_word_embeddings=True) for seed in (1, 2))
    tensors = named(new, aliases=aliases or dropped is not None)
    if dropped is not None:
        del tensors[dropped]
    put(bind(old, Staged(1, tensors)))
    assert old.lm_head.weight is old.model.embed_tokens.weight
    assert ids(old) == ids(new)


def test_a_tied_name_that_the_manifest_calls_an_alias_is_no_stranger() -> None:
    """As the learner publishes tied weights: one tensor in the manifest, both names in what arrived."""
    old, new = (tiny(seed, tie_word_embeddings=True) for seed in (1, 2))
    once = Staged(1, named(new)).manifest
    manifest = msgspec.structs.replace(once, aliases={"lm_head.weight": "model.embed_tokens.weight"})
    put(bind(old, Staged(1, named(new, aliases=True), manifest)))
    assert ids(old) == ids(new)


def test_tied_names_with_different_values_are_refused() -> None:
    model = tiny(1, tie_word_embeddings=True)
    tensors = named(tiny(2, tie_word_embeddings=True), aliases=True)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    with pytest.raises(ValueError, match=r"different values for .*, which are tied"):
        bind(model, Staged(1, tensors))


def test_an_untied_head_must_come() -> None:
    tensors = named(tiny(2))
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"lack parameters .*\(lm_head.weight\)"):
        bind(tiny(1), Staged(1, tensors))


def test_many_missing_names_are_counted() -> None:
    tensors = dict(list(named(tiny(2)).items())[:2])
    with pytest.raises(ValueError, match=r"and \d+ more"):
        bind(tiny(1), Staged(1, tensors))


def test_weights_of_another_precision_are_converted() -> None:
    new = tiny(2)
    model = tiny(1, dtype=torch.bfloat16)
    put(bind(model, Staged(1, named(new))))
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, new.lm_head.weight.bfloat16())


def test_buffers_may_come_and_must_be_known() -> None:
    kind = "deepseek_v3"
    options: dict[str, Any] = {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    }
    old, new = tiny(1, kind, **options), tiny(2, kind, **options)
    biases = [name for name, _ in new.named_buffers() if name.endswith("e_score_correction_bias")]
    assert biases
    for name in biases:
        new.get_buffer(name).fill_(0.3)
    put(bind(old, Staged(1, {**named(new), **{name: new.get_buffer(name) for name in biases}})))
    assert ids(old) == ids(new)


def test_nothing_changes_when_something_does_not_fit() -> None:
    model = tiny(1)
    before = ids(model)
    tensors = named(tiny(2))
    last = list(tensors)[-1]
    tensors[last] = tensors[last][..., :-1]
    with pytest.raises(ValueError, match=rf"version 3 have {last} of shape \[\d+(, \d+)*\] where the engine's model has"):
        bind(model, Staged(3, tensors))
    assert ids(model) == before
