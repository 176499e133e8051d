"""The trajectory queue: payloads whole and in order, bytes counted, spilled when too many, never lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.queue import Place, SpillFailed, TrajectoryQueue
from segue.episode import log_checksum
from segue.errors import RunFailed


def spill(queue: TrajectoryQueue) -> int:
    """Spill until memory is within the limit; how many files that took."""
    files = 0
    while (job := queue.plan_spill()) is not None:
        job.write()
        queue.finish_spill(job)
        files += 1
    return files


def test_a_log_is_its_payloads_in_order(tmp_path: Path) -> None:
    queue = TrajectoryQueue(tmp_path / "queue", 1000)
    queue.append(1, b"a")
    queue.append(2, b"xx")
    queue.append(1, b"bc")
    assert queue.reader(1)() == [b"a", b"bc"]
    assert queue.count(1) == 2
    assert queue.checksum(1) == log_checksum([b"a", b"bc"])
    assert queue.memory_bytes == 5
    queue.discard(1)
    assert queue.memory_bytes == 2 and queue.reader(1)() == [] and queue.count(1) == 0 and queue.checksum(1) == 0


def test_nothing_is_written_while_it_fits(tmp_path: Path) -> None:
    queue = TrajectoryQueue(tmp_path / "queue", 100)
    queue.append(1, b"x" * 100)
    assert queue.plan_spill() is None
    assert not (tmp_path / "queue").exists()


def test_what_is_needed_last_is_spilled_first(tmp_path: Path) -> None:
    queue = TrajectoryQueue(tmp_path / "queue", 100)
    for episode in range(4):
        queue.append(episode, bytes([episode]) * 40)
    queue.move(0, Place.KEPT)
    queue.finished(1)
    job = queue.plan_spill()
    assert job is not None
    assert [episode for episode, _, _ in job.logs] == [0, 1], "the kept batch, then the finished episode, then the live ones"
    assert queue.bytes_by_place == {Place.LIVE: 80, Place.READY: 40, Place.KEPT: 40}


def test_a_spilled_log_goes_on_and_reads_back_whole(tmp_path: Path) -> None:
    queue = TrajectoryQueue(tmp_path / "queue", 10)
    queue.append(1, b"a" * 20)
    assert spill(queue) == 1
    assert queue.memory_bytes == 0
    queue.append(1, b"b" * 30)
    assert spill(queue) == 1
    queue.append(1, b"c")
    assert queue.reader(1)() == [b"a" * 20, b"b" * 30, b"c"]
    assert queue.checksum(1) == log_checksum(queue.reader(1)())
    assert queue.count(1) == 3
    assert len(list((tmp_path / "queue").iterdir())) == 2
    queue.discard(1)
    assert not list((tmp_path / "queue").iterdir()), "files go with the last log in them"


def test_until_the_file_is_complete_everything_stays_in_memory(tmp_path: Path) -> None:
    queue = TrajectoryQueue(tmp_path / "queue", 10)
    queue.append(1, b"a" * 20)
    queue.append(2, b"b" * 20)
    job = queue.plan_spill()
    assert job is not None
    assert queue.reader(1)() == [b"a" * 20] and queue.memory_bytes == 40
    queue.append(1, b"new")
    queue.discard(2)
    job.write()
    queue.finish_spill(job)
    assert queue.reader(1)() == [b"a" * 20, b"new"]
    assert queue.memory_bytes == 3
    assert queue.reader(2)() == []


def test_a_full_disk_is_one_sentence_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = TrajectoryQueue(tmp_path / "queue", 10)
    queue.append(1, b"a" * 20)
    job = queue.plan_spill()
    assert job is not None

    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SpillFailed, match=r"No space left on device.*queue\.bytes") as caught:
        job.write()
    assert isinstance(caught.value, RunFailed) and caught.value.part == "scheduler"
    assert "\n" not in caught.value.sentence
    assert queue.reader(1)() == [b"a" * 20]
    assert not list((tmp_path / "queue").iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_really_full_device_is_the_same_error(tmp_path: Path) -> None:
    queue = TrajectoryQueue(tmp_path / "queue", 10)
    queue.append(1, b"a" * 2_000_000)
    job = queue.plan_spill()
    assert job is not None
    (tmp_path / "queue" / job.path.with_suffix(".part").name).symlink_to("/dev/full")
    with pytest.raises(SpillFailed, match="No space left"):
        job.write()


@pytest.mark.parametrize("damage", ["gone", "short", "changed"])
def test_a_damaged_file_is_an_error_that_names_it(damage: str, tmp_path: Path) -> None:
    queue = TrajectoryQueue(tmp_path / "queue", 10)
    queue.append(1, b"a" * 20)
    spill(queue)
    (file,) = (tmp_path / "queue").iterdir()
    data = file.read_bytes()
    if damage == "gone":
        file.unlink()
    elif damage == "short":
        file.write_bytes(data[:-1])
    else:
        file.write_bytes(data[:-1] + b"z")
    with pytest.raises(SpillFailed, match=r"spill-000001\.bin"):
        queue.reader(1)()


def test_files_of_an_earlier_life_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "queue"
    folder.mkdir()
    (folder / "spill-000001.bin").write_bytes(b"old")
    (folder / "spill-000002.part").write_bytes(b"old")
    (folder / "notes.txt").write_bytes(b"mine")
    queue = TrajectoryQueue(folder, 10)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    queue.append(1, b"a" * 20)
    spill(queue)
    queue.close()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append", "ready", "kept", "discard", "spill"]),
        st.integers(0, 4),
        st.binary(max_size=30),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(steps=STEPS, limit=st.integers(1, 60))
def test_whatever_is_done_in_whatever_order_logs_are_whole(
    steps: list[tuple[str, int, bytes]], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("queue")
    queue = TrajectoryQueue(folder, limit)
    model: dict[int, list[bytes]] = {}
    for what, episode, payload in steps:
        if what == "append":
            queue.append(episode, payload)
            model.setdefault(episode, []).append(payload)
        elif what == "ready":
            queue.finished(episode)
        elif what == "kept":
            queue.move(episode, Place.KEPT)
        elif what == "discard":
            queue.discard(episode)
            model.pop(episode, None)
        else:
            spill(queue)
            assert queue.memory_bytes <= limit
        assert queue.memory_bytes == sum(queue.bytes_by_place.values())
        assert len(queue) == len(model)
        for known, log in model.items():
            assert queue.reader(known)() == log
            assert queue.checksum(known) == log_checksum(log)
    for episode in list(model):
        queue.discard(episode)
    assert queue.memory_bytes == 0
    assert not list(folder.iterdir())
