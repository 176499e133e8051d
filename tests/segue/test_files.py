"""Files that a crash never leaves half written, and one sentence when the disk is full."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.errors import DiskFailed, RunFailed, UserError
from segue.files import JsonLines, disk_errors, plain, read_jsonl, write_atomic, write_json

# --- JSON lines -----------------------------------------------------------------------------------------------------


def test_every_line_is_there_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        for step in range(3):
            lines.append({"step": step, "loss": float("nan"), "ages": (1, 2)})
            assert read_jsonl(path)[-1] == {"step": step, "loss": None, "ages": [1, 2]}
    with JsonLines(path) as lines:
        lines.append({"step": 3})
    assert [line["step"] for line in read_jsonl(path)] == [0, 1, 2, 3]


@settings(max_examples=40)
@given(cut=st.integers(0, 60))
def test_a_torn_last_line_is_left_out_and_cut_before_the_next(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    whole = b"".join(json.dumps({"step": step, "text": "ü"}).encode() + b"\n" for step in range(2))
    path.write_bytes(whole[: min(cut, len(whole))])
    before = read_jsonl(path)
    assert [line["step"] for line in before] == list(range(whole[:cut].count(b"\n")))
    with JsonLines(path) as lines:
        lines.append({"step": 9})
    assert read_jsonl(path) == [*before, {"step": 9}]


def test_a_broken_line_in_the_middle_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nnonsense\n{"step": 1}\n')
    with pytest.raises(UserError, match=r"Line 2 of .*metrics.jsonl is no JSON object"):
        read_jsonl(path)


# --- files that are whole or absent ---------------------------------------------------------------------------------


def test_an_atomic_write_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1, "loss": float("inf")})
    write_json(path, {"a": (2, 3)})
    assert json.loads(path.read_text()) == {"a": [2, 3]}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_write_that_fails_keeps_the_old_file_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, b"old")

    def no_space(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(RunFailed, match="the disk is full: free some space there and go on with --resume") as failed:
        write_atomic(path, b"new")
    assert failed.value.part == "disk"
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_metrics_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    lines = JsonLines.__new__(JsonLines)  # opening it reads it, which /dev/full answers with zeros without end
    lines.path = path
    lines._file = open(path, "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(RunFailed) as failed:
        lines.append({"step": 1})
    assert str(failed.value) == (
        f"{path} could not be written because the disk is full: free some space there and go on with --resume."
    )
    lines._file.close()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EDQUOT, "disk is full"),
        (errno.EROFS, "not allowed"),
        (errno.EIO, "reports an error"),
    ],
)
def test_each_disk_trouble_has_its_sentence(number: int, words: str) -> None:
    with pytest.raises(DiskFailed, match=words) as failed, disk_errors(Path("x")):
        raise OSError(number, os.strerror(number))
    assert " and go on with --resume" in failed.value.sentence
    assert "resume" not in failed.value.place


def test_a_folder_that_was_removed_meanwhile_is_named_and_nobody_is_told_to_resume(tmp_path: Path) -> None:
    with pytest.raises(DiskFailed) as failed:
        write_atomic(tmp_path / "run" / "trajectories" / "1.json", b"{}")
    gone = tmp_path / "run" / "trajectories"
    assert str(failed.value) == f"{gone} is gone: it was removed or moved while it was being written to."


def test_other_errors_are_not_taken_for_a_full_disk() -> None:
    with pytest.raises(FileNotFoundError), disk_errors(Path("x")):
        raise FileNotFoundError(errno.ENOENT, "no such file")


JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)


@settings(max_examples=40)
@given(st.recursive(JSON, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)))
def test_plain_makes_valid_json_and_changes_nothing_but_what_is_not_finite(value: Any) -> None:
    made = plain(value)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert plain(made) == made
