"""Checkpoints: `checkpoints/step_N/` is complete or absent. Written aside, synced to disk, a marker last, renamed into place.

    step_N/
      models/policy/       a Hugging Face folder (float32), tokenizer files included
      optimizer.safetensors, rng.safetensors
      scheduler.cut        the scheduler's state at the same acknowledgement, as it gave it
      COMPLETE             JSON: step, and size and CRC-32 of every file

Nothing in it is a pickle. Whole tensors are stored, so that any number of ranks can resume it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from learner.model import POLICY
from segue.errors import RunFailed, UserError
from segue.rundir import CHECKPOINT_COMPLETE, SCHEDULER_CUT, RunDir

FORMAT = 1
OPTIMIZER = "optimizer.safetensors"
RNG = "rng.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_FULL = (errno.ENOSPC, errno.EDQUOT)

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class LearnerState:
    """What rank 0 writes: whole tensors on the CPU or the GPU, copied by writing.

    `models` maps a model's name to its tensors and its configs (objects with `save_pretrained`); `optimizer` and `rng` are flat.
    """

    step: int
    models: Mapping[str, tuple[Tensors, list[Any]]]
    optimizer: Tensors
    rng: Tensors


def model_folder(checkpoint: Path, name: str = POLICY) -> Path:
    """The Hugging Face folder of one model in a checkpoint."""
    return checkpoint / "models" / name


def read_tokenizer(path: str) -> dict[str, bytes]:
    """The tokenizer files of a model folder (or of a model of that name), by file name; empty where there are none."""
    folder = Path(path)
    if folder.is_dir():
        return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as temporary:
        AutoTokenizer.from_pretrained(path).save_pretrained(temporary)
        return read_tokenizer(temporary)


def write_checkpoint(run_dir: Path, state: LearnerState, cut: bytes, tokenizer: Mapping[str, bytes], keep: int) -> Path:
    """Write `checkpoints/step_N` and then remove all but the newest `keep`. Returns its path.

    `tokenizer` holds the files of `read_tokenizer`: the folder they came from may be a checkpoint that is removed here.
    Raises `RunFailed` with one sentence when the disk is full or cannot be written; older checkpoints are then untouched.
    """
    root = run_dir / "checkpoints"
    final = root / f"step_{state.step}"
    aside = root / f".step_{state.step}.writing"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob(".step_*"):
            shutil.rmtree(stale)
        aside.mkdir()
        _write_files(aside, state, cut, tokenizer)
        _write_marker(aside, state.step)
        if final.exists():  # the same step again, after a resume from an earlier one
            _discard(final)
        os.rename(aside, final)
        _sync_folder(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise _cannot_write(root, state.step, error) from error
    for old in RunDir(run_dir).complete_checkpoints()[:-keep]:
        _discard(old.path)
    return final


def _write_files(aside: Path, state: LearnerState, cut: bytes, tokenizer: Mapping[str, bytes]) -> None:
    for name, (tensors, configs) in state.models.items():
        folder = model_folder(aside, name)
        folder.mkdir(parents=True)
        for config in configs:
            config.save_pretrained(folder)
        _save(tensors, folder / "model.safetensors")
        for file, content in tokenizer.items():
            (folder / file).write_bytes(content)
    _save(state.optimizer, aside / OPTIMIZER)
    _save(state.rng, aside / RNG)
    (aside / SCHEDULER_CUT).write_bytes(cut)


def _save(tensors: Tensors, path: Path) -> None:
    """Tied tensors once: transformers ties them again when it loads."""
    seen: set[int] = set()
    once = {}
    for name, tensor in tensors.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            once[name] = tensor.detach().contiguous()
    save_file(once, path, metadata={"format": "pt"})


def _write_marker(aside: Path, step: int) -> None:
    """Sync every file, then write down what a complete checkpoint holds, then sync that."""
    files = {}
    for path in sorted(p for p in aside.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[str(path.relative_to(aside))] = {"bytes": path.stat().st_size, "crc32": _crc(path)}
    marker = aside / CHECKPOINT_COMPLETE
    with marker.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "step": step, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for folder in (p for p in (aside, *aside.rglob("*")) if p.is_dir()):
        _sync_folder(folder)


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _discard(path: Path) -> None:
    """Absent at once, then removed: a half-removed checkpoint never looks like one."""
    aside = path.with_name(f".{path.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _cannot_write(root: Path, step: int, error: Exception) -> RunFailed:
    kept = [folder.path.name for folder in RunDir(root.parent).complete_checkpoints()]
    newest = f"the newest complete one is {kept[-1]}" if kept else "there is no earlier one"
    if any(_is(error, code) for code in _FULL):
        why, remedy = "its disk is full", "free some space"
    elif _is(error, errno.EFBIG):
        why, remedy = "a file would exceed the limit on file sizes", "raise it (ulimit -f)"
    else:
        why, remedy = str(error).rstrip("."), "check its permissions and its disk"
    return RunFailed(
        "learner", f"The checkpoint of step {step} could not be written to {root}: {why}; {newest}; {remedy} and resume."
    )


def _is(error: Exception, code: int) -> bool:
    """Whether it is the system's error `code`; safetensors reports it as text only."""
    return (isinstance(error, OSError) and error.errno == code) or f"(os error {code})" in str(error)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint that was verified byte by byte."""

    path: Path
    step: int

    def optimizer(self) -> dict[str, torch.Tensor]:
        return _load(self.path / OPTIMIZER)

    def rng(self) -> dict[str, torch.Tensor]:
        return _load(self.path / RNG)

    def cut(self) -> bytes:
        """The scheduler's state at the same acknowledgement."""
        return (self.path / SCHEDULER_CUT).read_bytes()


def _load(path: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(path)
    return loaded


def open_checkpoint(path: Path) -> Checkpoint:
    """Verify a checkpoint. Raises `UserError` with one sentence: it is missing, incomplete, damaged, or of another format."""
    remedy = "remove that folder to resume from an earlier one, or start the run anew"
    if not path.is_dir():
        raise UserError(f"There is no checkpoint {path}: name one that exists.")
    try:
        marker = json.loads((path / CHECKPOINT_COMPLETE).read_text(encoding="utf-8"))
        step, files, version = int(marker["step"]), dict(marker["files"]), marker["format"]
    except FileNotFoundError:
        raise UserError(f"The checkpoint {path} is incomplete (it has no {CHECKPOINT_COMPLETE} file): {remedy}.") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"The checkpoint {path} is damaged (its {CHECKPOINT_COMPLETE} file cannot be read): {remedy}.") from None
    if version != FORMAT:
        raise UserError(
            f"The checkpoint {path} has format {version}, this Segue reads format {FORMAT}: use the Segue that wrote it."
        )
    for name, expected in files.items():
        with _damaged(path, name, remedy):
            file = path / name
            if file.stat().st_size != expected["bytes"] or _crc(file) != expected["crc32"]:
                raise ValueError
    return Checkpoint(path, step)


@contextlib.contextmanager
def _damaged(path: Path, name: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"The checkpoint {path} is damaged ({name} is not what was written): {remedy}.") from None
