"""A folder whose weights are not those of its config is refused by both loaders, in one sentence; what is harmless is not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from learner.model import load_model
from rollout.embedded.support import open_config, open_model
from segue.errors import UserError
from segue.model_folder import check_weight_files

torch.set_num_threads(1)
Weights = dict[str, torch.Tensor]


def by_learner(folder: Path) -> None:
    load_model(folder)


def by_engine(folder: Path) -> None:
    open_model(str(folder), open_config(str(folder), 32), "float32", "cpu")


LOADERS = pytest.mark.parametrize("load", [by_learner, by_engine])
DOWN = "model.layers.0.mlp.down_proj.weight"


def folder_of(path: Path, change: Callable[[Weights], object], tied: bool = False, **config: object) -> Path:
    """A tiny Llama's folder after a change to its weights and its config.json."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64, tie_word_embeddings=tied)).save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | config))
    return path


def refusal(folder: Path, load: Callable[[Path], None]) -> str:
    with pytest.raises(UserError) as error:
        load(folder)
    sentence = str(error.value)
    assert sentence.startswith(f"The weights in {folder} are not those of the model in its config.json")
    assert sentence.endswith("copy it again whole, or name another folder in model.path.") and "\n" not in sentence
    return sentence


@LOADERS
def test_a_missing_weight_is_named(tmp_path: Path, load: Callable[[Path], None]) -> None:
    assert f": {DOWN} is missing; " in refusal(folder_of(tmp_path, lambda w: w.pop(DOWN)), load)


@LOADERS
def test_a_head_that_is_not_tied_must_be_there(tmp_path: Path, load: Callable[[Path], None]) -> None:
    assert ": lm_head.weight is missing; " in refusal(folder_of(tmp_path, lambda w: w.pop("lm_head.weight")), load)


@LOADERS
def test_weights_of_another_architecture_are_named_and_counted(tmp_path: Path, load: Callable[[Path], None]) -> None:
    sentence = refusal(folder_of(tmp_path, lambda w: None, model_type="gpt2", n_embd=16, n_head=2, n_layer=2), load)
    assert " more are missing, and it has model.embed_tokens.weight and 19 more, which that model lacks; " in sentence
    assert ": transformer.h.0.attn.c_attn." in sentence


@LOADERS
def test_a_weight_of_another_shape_is_named(tmp_path: Path, load: Callable[[Path], None]) -> None:
    folder = folder_of(tmp_path, lambda w: w.update({DOWN: torch.zeros(16, 20)}))
    assert f": {DOWN} has the shape [16, 20] instead of [16, 24]; " in refusal(folder, load)


@LOADERS
def test_layers_that_the_config_lacks_are_refused(tmp_path: Path, load: Callable[[Path], None]) -> None:
    folder = folder_of(tmp_path, lambda w: None, num_hidden_layers=1)
    assert "which has no model.layers.1.input_layernorm.weight and 8 more: " in refusal(folder, load)


@LOADERS
def test_what_is_absent_or_there_on_purpose_is_fine(
    tmp_path: Path, load: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    def change(weights: Weights) -> None:
        assert "lm_head.weight" not in weights, "tied"
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # folders of old versions have them
        weights["v_head.weight"] = torch.zeros(1, 16)

    with caplog.at_level(logging.WARNING, "segue"):
        load(folder_of(tmp_path, change, tied=True))
    assert [r.getMessage() for r in caplog.records if r.name == "segue.model_folder"] == [
        f"{tmp_path} has weights that the model does not use: v_head.weight"
    ]


# --- files ---------------------------------------------------------------------------------------------------------------


def weights(path: Path) -> bytes:
    """A small safetensors file, as its own library writes it; returns its bytes."""
    save_file({"a": torch.arange(6.0), "b": torch.zeros(2, 3)}, path)
    return path.read_bytes()


def test_whole_weights_pass_in_one_file_or_several(tmp_path: Path) -> None:
    check_weight_files(tmp_path)
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        weights(tmp_path / name)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_weight_files(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"are not whole \(model-00002-of-00002.safetensors is missing\): copy it again whole"):
        check_weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(UserError, match=r"index.json is damaged, which says where the weights are: copy it again"):
        check_weight_files(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 8, 60, -1])
def test_weights_cut_short_are_one_sentence_before_anything_starts(tmp_path: Path, keep: int) -> None:
    """At every place: in the length, in the header, in the last tensor."""
    path = tmp_path / "model.safetensors"
    whole = weights(path)
    path.write_bytes(whole[:keep])
    with pytest.raises(UserError) as refused:
        check_weight_files(tmp_path)
    assert str(refused.value).startswith(f"The weights in {path} are cut short ({len(whole[:keep])} bytes of at least ")
    assert str(refused.value).endswith("): copy it again whole, or name another folder in model.path.")


def test_weights_that_are_something_else_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((9).to_bytes(8, "little") + b"not JSON!" + bytes(100))
    with pytest.raises(UserError, match=r"are damaged \(their header cannot be read\): copy it again whole"):
        check_weight_files(tmp_path)
