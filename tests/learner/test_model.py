"""Loading models by path, with a sentence for what is none; full tensors under Hugging Face names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import tiny_llama

from learner.model import full_tensors, load_model, meta_tensors, shard
from learner.packing import pack
from learner.world import alone, leave_world
from segue.errors import UserError
from weightsync.manifest import layout


def test_a_saved_model_loads_and_computes_the_same(tmp_path: Path) -> None:
    lm = tiny_llama(seed=4)
    lm.save_pretrained(tmp_path / "m")
    model = load_model(tmp_path / "m")
    ids = np.array([3, 9, 27, 4])
    logprobs, _ = model(pack([0], [ids], [np.array([0, 1, 1, 1])]))
    expected = torch.log_softmax(lm(torch.from_numpy(ids)[None]).logits[0, :-1], -1).gather(1, torch.from_numpy(ids)[1:, None])[
        :, 0
    ]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_temperature_is_applied_as_in_sampling(tmp_path: Path) -> None:
    lm = tiny_llama(seed=4)
    lm.save_pretrained(tmp_path / "m")
    ids = np.array([3, 9, 27, 4])
    row = pack([0], [ids], [np.array([0, 1, 1, 1])], {"temperature": [np.full(4, 0.7, dtype=np.float32)]})
    logits = lm(torch.from_numpy(ids)[None]).logits[0, :-1]
    expected = torch.log_softmax(logits / 0.7, -1).gather(1, torch.from_numpy(ids)[1:, None])[:, 0]
    torch.testing.assert_close(load_model(tmp_path / "m")(row)[0], expected, atol=1e-5, rtol=0)


def test_what_is_no_model_gets_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "garbled").mkdir()
    (tmp_path / "garbled" / "config.json").write_text("{nonsense")
    cases = {
        tmp_path / "nowhere": "There is no model folder",
        tmp_path / "empty": "has no config.json",
        tmp_path / "bad": "cannot be loaded",
        tmp_path / "garbled": "cannot be loaded",
    }
    for path, expected in cases.items():
        with pytest.raises(UserError) as error:
            load_model(path)
        sentence = str(error.value)
        assert expected in sentence and str(path) in sentence and "model.path" in sentence
        assert "\n" not in sentence and sentence.endswith(".")


@pytest.mark.parametrize("tied", [False, True])
def test_full_tensors_have_hugging_face_names_and_tied_ones_are_one_tensor(tmp_path: Path, tied: bool) -> None:
    lm = tiny_llama(tied=tied)
    lm.save_pretrained(tmp_path / "m")
    model = load_model(tmp_path / "m")
    tensors = full_tensors(model, meta_tensors(model))
    assert set(tensors) == set(lm.state_dict())
    assert (tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"]) is tied
    assert full_tensors(model, ()) == {}
    assert set(full_tensors(model, ["lm_head.weight"])) == {"lm_head.weight"}


@pytest.mark.parametrize("tied", [False, True])
def test_meta_tensors_are_laid_out_as_the_full_ones(tmp_path: Path, tied: bool) -> None:
    """Every rank can say which tensors are in whose bucket without gathering any."""
    tiny_llama(tied=tied).save_pretrained(tmp_path / "m")
    model = load_model(tmp_path / "m")
    metas = meta_tensors(model)
    assert all(tensor.is_meta for tensor in metas.values())
    full = full_tensors(model, metas)
    assert list(full) == list(metas)
    head = ("model.embed_tokens.weight", "lm_head.weight")
    assert layout(metas) == layout(full) == layout(metas | {name: full[name] for name in head})


def test_bfloat16_on_one_rank_keeps_float32_weights(tmp_path: Path) -> None:
    lm = tiny_llama(seed=4)
    lm.save_pretrained(tmp_path / "m")
    ids = np.array([3, 9, 27, 4, 8])
    row = pack([0], [ids], [np.array([0, 1, 1, 1, 1])])
    exact, rounded = load_model(tmp_path / "m"), load_model(tmp_path / "m")
    alone()
    try:
        shard(rounded, "bfloat16")
        (want, _), (got, _) = exact(row), rounded(row)
        got.sum().backward()
        assert got.dtype == torch.float32
        assert 0 < float((got - want).detach().abs().max()) < 0.1
        assert all(p.dtype == torch.float32 and p.grad is not None for p in rounded.parameters())
        rounded.reshard()
        for name, tensor in full_tensors(rounded, meta_tensors(rounded)).items():
            assert torch.equal(tensor, lm.state_dict()[name]), name
    finally:
        leave_world()
