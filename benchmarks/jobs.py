"""Work in several processes at once: a function of its arguments alone, so that what comes of it does not depend on how many."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

from benchmarks.command import INTERRUPTED, interrupt
from segue.cluster.processes import die_with_parent
from segue.errors import DiskFailed, RunFailed

END_SECONDS = 10.0
"""How long a process at work may take to clean up."""
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
R = TypeVar("R")


class _Failed(NamedTuple):
    """A `RunFailed` on its way out of a process, which it cannot leave as itself: it takes two arguments and keeps one."""

    part: str
    sentence: str


def each(play: Callable[..., R], work: Sequence[tuple[Any, ...]], jobs: int) -> Generator[tuple[int, R], None, None]:
    """`play(*arguments)` for each item of `work`, with the item's place, as they end; the first ones begin first.

    One job: in this process, in order. Else `play` must be found by its name, and arguments and results can be pickled.
    Raises what `play` raises, and `RunFailed` where a process is killed. Whatever ends this iterator ends the processes too.
    """
    if jobs == 1:
        for place, arguments in enumerate(work):
            yield place, play(*arguments)
        return
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    with ProcessPoolExecutor(max(1, min(jobs, len(work))), context, _begin, (os.getpid(),)) as pool:
        futures = {pool.submit(_play, play, arguments): place for place, arguments in enumerate(work)}
        try:
            for future in as_completed(futures):
                ended = future.result()
                if isinstance(ended, _Failed):
                    raise RunFailed(ended.part, ended.sentence)
                yield futures[future], ended
        except BrokenProcessPool:
            raise RunFailed(
                "jobs", "A process at work was killed, perhaps for want of memory: give the command again with fewer --jobs."
            ) from None
        except BaseException:
            _end(set(multiprocessing.active_children()) - before)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _end(workers: Collection[BaseProcess]) -> None:
    """Ask processes to end and kill those that do not. They are not reaped here, because the pool does that."""
    for worker in workers:
        worker.terminate()
    left = {worker.sentinel: worker for worker in workers}
    deadline = time.monotonic() + END_SECONDS
    while left and (gone := wait(list(left), max(0.0, deadline - time.monotonic()))):
        for sentinel in gone:
            del left[sentinel]  # type: ignore[arg-type]
    for worker in left.values():
        worker.kill()


def _begin(parent: int) -> None:
    """In a process that waits for work, Ctrl-C is its parent's affair."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _play(play: Callable[..., R], arguments: tuple[Any, ...]) -> R | _Failed:
    """In a process of its own, which an interrupt ends once its work has cleaned up: it must not begin with the next item."""
    for number in _INTERRUPTS:
        signal.signal(number, lambda *_: interrupt())
    try:
        return play(*arguments)
    except DiskFailed:
        raise
    except RunFailed as error:
        return _Failed(error.part, error.sentence)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
