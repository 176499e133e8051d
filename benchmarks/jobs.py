"""Work in several processes at once: a function of its arguments alone, so that what comes of it does not depend on how many."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple, TypeVar

from segue.cluster.processes import die_with_parent
from segue.errors import RunFailed

R = TypeVar("R")


class _Failed(NamedTuple):
    """A `RunFailed` on its way out of a process, which it cannot leave as itself: it takes two arguments and keeps one."""

    part: str
    sentence: str


def each(play: Callable[..., R], work: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[tuple[int, R]]:
    """`play(*arguments)` for each item of `work`, with the item's place, as they end; the first ones begin first.

    One job: in this process, in order. Else `play` must be found by its name, and arguments and results can be pickled.
    Raises what `play` raises. Whoever ends this process, or Ctrl-C, ends the others.
    """
    if jobs == 1:
        for place, arguments in enumerate(work):
            yield place, play(*arguments)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(jobs, len(work))), context, _begin, (os.getpid(),)) as pool:
        futures = {pool.submit(_play, play, arguments): place for place, arguments in enumerate(work)}
        try:
            for future in as_completed(futures):
                ended = future.result()
                if isinstance(ended, _Failed):
                    raise RunFailed(ended.part, ended.sentence)
                yield futures[future], ended
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(parent: int) -> None:
    """In a process that waits for work, Ctrl-C is its parent's affair."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _play(play: Callable[..., R], arguments: tuple[Any, ...]) -> R | _Failed:
    """In a process of its own; Ctrl-C ends the work, so that nobody waits for it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return play(*arguments)
    except RunFailed as error:
        return _Failed(error.part, error.sentence)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
