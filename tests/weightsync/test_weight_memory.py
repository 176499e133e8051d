"""Host memory for buckets: used again, and never while anybody holds a view of it."""

import gc
import threading

import torch

from weightsync.memory import Arena


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
