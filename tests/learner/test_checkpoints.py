"""Checkpoints: complete or absent, verified, loadable by transformers, and resumed bit by bit."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_data import learner_config, prepare_batch, random_batch, tiny_llama
from transformers import AutoModelForCausalLM

from learner.checkpoints import (
    model_folder,
    open_checkpoint,
    read_tokenizer,
    write_checkpoint,
)
from learner.model import POLICY, load_model
from learner.state import gather_state, restore_state
from learner.trainer import Trainer
from segue.config import Config
from segue.errors import RunFailed, UserError
from segue.rundir import CHECKPOINT_COMPLETE, RunDir

CONFIG = learner_config(learner={"lr": 0.01, "pack_tokens": 64, "weight_decay": 0.1, "lr_schedule": "cosine"})


def _model(folder: Path, tied: bool = False) -> Path:
    tiny_llama(seed=1, tied=tied).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "chat_template.jinja").write_text("{{ x }}")
    return folder


def _train(trainer: Trainer, config: Config = CONFIG) -> dict[str, float]:
    step = trainer.step
    batch = random_batch(seed=step, step=step, versions=(step,))
    return trainer.train(prepare_batch(batch, config), version=step).stats


def _write(run: Path, trainer: Trainer, keep: int = 2, cut: bytes = b"cut", tokenizer: Path | None = None) -> Path:
    state = gather_state(trainer, keep=True)
    assert state is not None
    return write_checkpoint(run, state, cut, read_tokenizer(str(tokenizer)) if tokenizer else {}, keep)


@pytest.mark.parametrize("tied", [False, True])
def test_a_resumed_learner_goes_on_bit_by_bit(tmp_path: Path, tied: bool) -> None:
    model = _model(tmp_path / "model", tied)
    torch.manual_seed(5)
    first = Trainer({POLICY: load_model(model)}, CONFIG)
    for _ in range(3):
        _train(first)
    path = _write(tmp_path, first, cut=b"\x00the scheduler's\xff", tokenizer=model)
    went_on = [_train(first) for _ in range(3)]
    noise = torch.rand(3)

    torch.manual_seed(99)
    checkpoint = open_checkpoint(path)
    second = Trainer({POLICY: load_model(model_folder(path))}, CONFIG)
    restore_state(second, checkpoint, rank=0)
    assert second.step == checkpoint.step == 3 and checkpoint.cut() == b"\x00the scheduler's\xff"
    assert [_train(second) for _ in range(3)] == went_on
    assert torch.equal(torch.rand(3), noise)
    for a, b in zip(first.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_forgetting_the_optimizer_would_show(tmp_path: Path) -> None:
    """The test above can fail: without its moments the resumed run differs."""
    first = Trainer({POLICY: load_model(_model(tmp_path / "model"))}, CONFIG)
    _train(first)
    path = _write(tmp_path, first)
    second = Trainer({POLICY: load_model(model_folder(path))}, CONFIG, step=1)
    _train(first)
    _train(second)
    assert not all(torch.equal(a, b) for a, b in zip(first.policy.parameters(), second.policy.parameters(), strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_the_model_in_a_checkpoint(tmp_path: Path, tied: bool) -> None:
    model = _model(tmp_path / "model", tied)
    trainer = Trainer({POLICY: load_model(model)}, CONFIG)
    _train(trainer)
    folder = model_folder(_write(tmp_path, trainer, tokenizer=model))
    lm = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in trainer.policy.lm.state_dict().items():
        assert torch.equal(lm.state_dict()[name], tensor)
    assert lm.config._attn_implementation == "sdpa"
    assert (folder / "tokenizer.json").read_text() == '{"a": 1}' and (folder / "chat_template.jinja").exists()


def test_the_newest_are_kept_and_step_numbers_sort_as_numbers(tmp_path: Path) -> None:
    trainer = Trainer({POLICY: load_model(_model(tmp_path / "model"))}, CONFIG)
    for step in (8, 9, 10):
        trainer.step = step
        _write(tmp_path, trainer, keep=2)
    assert [folder.path.name for folder in RunDir(tmp_path).complete_checkpoints()] == ["step_9", "step_10"]
    assert RunDir(tmp_path).latest_checkpoint().path.name == "step_10"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_9"]
    _write(tmp_path, trainer, cut=b"again")  # the same step once more
    assert open_checkpoint(RunDir(tmp_path).latest_checkpoint().path).cut() == b"again"


def test_what_a_killed_writer_left_is_no_checkpoint(tmp_path: Path) -> None:
    trainer = Trainer({POLICY: load_model(_model(tmp_path / "model"))}, CONFIG)
    half = tmp_path / "checkpoints" / ".step_4.writing"
    half.mkdir(parents=True)
    (half / "model").write_text("half")
    with pytest.raises(UserError, match="no complete checkpoint"):
        RunDir(tmp_path).latest_checkpoint()
    _write(tmp_path, trainer)
    assert not half.exists()


@contextlib.contextmanager
def _files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to let any file grow beyond `size` bytes: the same errors as a full disk, without filling one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [200, 20_000, 100_000])
def test_a_failed_write_is_one_sentence_and_the_older_checkpoint_stays(tmp_path: Path, size: int) -> None:
    """The limit is hit in the config, in the weights (59 kB) or in the optimizer's moments (twice that)."""
    trainer = Trainer({POLICY: load_model(_model(tmp_path / "model"))}, CONFIG)
    _train(trainer)
    older = _write(tmp_path, trainer)
    _train(trainer)
    with _files_of_at_most(size), pytest.raises(RunFailed) as error:
        _write(tmp_path, trainer)
    assert error.value.part == "learner"
    sentence = error.value.sentence
    assert "step 2" in sentence and "limit on file sizes" in sentence and "step_1" in sentence and sentence.endswith(".")
    assert "\n" not in sentence
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_1"]
    assert open_checkpoint(older).step == 1
    assert _write(tmp_path, trainer).name == "step_2"  # with space again it goes on


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    trainer = Trainer({POLICY: load_model(_model(tmp_path / "model"))}, CONFIG)
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(RunFailed, match=r"could not be written to .*checkpoints: .*there is no earlier one"):
        _write(tmp_path, trainer)


def _spoil(path: Path, how: str) -> None:
    if how == "missing":
        for file in sorted(path.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        path.rmdir()
    elif how == "incomplete":
        (path / CHECKPOINT_COMPLETE).unlink()
    elif how == "flipped":
        file = model_folder(path) / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
    elif how == "cut short":
        file = path / "optimizer.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "a file is gone":
        (path / "scheduler.cut").unlink()
    elif how == "marker":
        (path / CHECKPOINT_COMPLETE).write_text("{")
    else:
        marker: dict[str, Any] = json.loads((path / CHECKPOINT_COMPLETE).read_text())
        (path / CHECKPOINT_COMPLETE).write_text(json.dumps({**marker, "format": 99}))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("missing", "There is no checkpoint"),
        ("incomplete", "is incomplete"),
        ("flipped", r"is damaged \(models/policy/model.safetensors"),
        ("cut short", r"is damaged \(optimizer.safetensors"),
        ("a file is gone", r"is damaged \(scheduler.cut"),
        ("marker", r"is damaged \(its COMPLETE"),
        ("format", "has format 99"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_gets_a_sentence(tmp_path: Path, how: str, expected: str) -> None:
    trainer = Trainer({POLICY: load_model(_model(tmp_path / "model"))}, CONFIG)
    path = _write(tmp_path, trainer)
    _spoil(path, how)
    with pytest.raises(UserError, match=expected) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_the_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = Trainer({POLICY: load_model(_model(tmp_path / "model"))}, CONFIG)
    _train(trainer)
    checkpoint = open_checkpoint(_write(tmp_path, trainer))
    tiny_llama(vocabulary=80).save_pretrained(tmp_path / "other")
    other = Trainer({POLICY: load_model(tmp_path / "other")}, CONFIG)
    with pytest.raises(UserError, match="optimizer of another model"):
        restore_state(other, checkpoint, rank=0)
