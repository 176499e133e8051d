"""The document that every benchmark writes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from benchmarks import result
from segue.build import git_sha


def test_the_processor_is_read_from_cpuinfo() -> None:
    text = (
        "processor\t: 0\nvendor_id\t: X\nmodel name\t: Some CPU @ 2.0GHz\nflags\t\t: a b\nprocessor\t: 1\nmodel name\t: Other\n"
    )
    assert result.cpu_model(text) == "Some CPU @ 2.0GHz"
    assert result.cpu_model("processor\t: 0\nFeatures\t: fp asimd\n") == ""


def test_the_machine_says_whether_it_was_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 9.0, 9.0))
    told = result.machine()
    assert (told["cores"], told["load_at_start"], told["quiet"]) == (2, 0.5, True)
    assert told["memory_bytes"] > 1 << 20 and told["cpu"]
    monkeypatch.setattr("os.getloadavg", lambda: (0.7, 0.0, 0.0))
    assert result.machine()["quiet"] is False


def test_a_document_has_the_figures_on_top_and_all_to_repeat_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["--set", "task.args.mean=1", "--config", "a folder/x.toml"]
    monkeypatch.setattr("sys.argv", ["/somewhere/engine.py", *arguments])
    where = {"cpu": "X", "quiet": True}
    told = result.document(
        "engine", {"ratio": 0.5}, seeds=[3, 4], arguments={"json": tmp_path, "n": 2}, packages=("numpy",), where=where
    )
    result.write(tmp_path / "out.json", told)
    read = json.loads((tmp_path / "out.json").read_text())
    assert read == told
    assert (read["benchmark"], read["ratio"], read["seeds"], read["machine"]) == ("engine", 0.5, [3, 4], where)
    assert read["arguments"] == {"json": str(tmp_path), "n": 2}
    assert shlex.split(read["command"]) == ["python", "-m", "benchmarks.engine", *arguments]
    assert read["versions"]["git_sha"] == git_sha() and read["versions"]["numpy"].count(".") == 2


def test_a_figure_may_not_hide_what_every_document_has() -> None:
    with pytest.raises(AssertionError, match="seeds"):
        result.document("engine", {"seeds": 1}, seeds=[])


def test_without_a_file_nothing_is_written() -> None:
    result.write(None, {"a": 1})
