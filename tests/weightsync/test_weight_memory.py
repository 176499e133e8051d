"""Host memory for buckets: used again, and never while anybody holds a view of it."""

import gc
import threading

import pytest
import torch

from weightsync.memory import Arena, Landing
from weightsync.worker import _read_here


def test_memory_is_used_again_only_when_the_last_view_of_it_has_gone() -> None:
    arena = Arena()
    first = arena.take(1 << 16)
    address = first.data_ptr()
    assert address % 4096 == 0
    view = first[64:128].view(torch.float32).view(4, 4)
    first.fill_(7)
    del first
    second = arena.take(1 << 16)
    assert second.data_ptr() != address
    second.fill_(9)
    assert view.view(torch.uint8).unique().tolist() == [7]  # a loader that kept a piece of it
    del view
    gc.collect()
    assert arena.take(1 << 16).data_ptr() == address


def test_only_what_the_next_version_needs_is_kept() -> None:
    arena = Arena()
    held = [arena.take(size) for size in (4096, 4096, 8192)]
    arena.keep([4096, 8192])
    del held[:]
    assert arena.spare_bytes() == 4096 + 8192
    arena.keep([4096])
    assert arena.spare_bytes() == 4096
    lent = arena.take(4096)
    arena.clear()
    del lent
    assert arena.spare_bytes() == 0
    assert arena.take(0).numel() == 0


def test_many_threads_never_share_a_buffer() -> None:
    arena = Arena()
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(200):
            mine = arena.take(4096)
            mine.fill_(mark)
            if mine.unique().tolist() != [mark]:
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and arena.spare_bytes() <= 2 * 4 * 4096  # each holds its last one while it takes the next


def test_work_is_queued_on_the_gpu_at_either_end() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    assert Landing(cpu).works_on == cpu and Landing(cpu, gpu, pinned=True).works_on == gpu
    assert Landing(gpu).works_on == Landing(gpu, cpu).works_on == gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_a_gpu_is_not_written_before_its_reader_is_done() -> None:
    """What a loader has queued may still wait when the last view of a bucket goes."""
    copy, side = torch.empty(1 << 24, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        bucket = torch.full((1 << 24,), 7, dtype=torch.uint8, device="cuda")
    side.synchronize()
    torch.cuda._sleep(1 << 28)
    for _, tensor in _read_here({"a": bucket}):
        copy.copy_(tensor, non_blocking=True)
    del bucket, tensor
    with torch.cuda.stream(side):
        torch.full((1 << 24,), 9, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert copy.unique().tolist() == [7]
