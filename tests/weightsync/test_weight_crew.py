"""Work in threads that can be left behind."""

import asyncio
import threading

import pytest

from weightsync.crew import Abandoned, Crew, Deadline


async def test_results_and_errors_come_back() -> None:
    crew = Crew("test")
    assert await crew.run(lambda left: 41 + 1, 30.0) == 42

    def fail(left: threading.Event) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await crew.run(fail, 30.0)
    assert crew.running() == 0


async def test_work_that_does_not_return_is_left_behind_and_told() -> None:
    crew = Crew("test")
    told = threading.Event()
    blocked = threading.Event()

    def block(left: threading.Event) -> None:
        blocked.wait()
        if left.is_set():
            told.set()

    with pytest.raises(Abandoned, match="test did not return within"):
        await crew.run(block, 0.01)
    assert crew.running() == 1
    blocked.set()
    assert await asyncio.to_thread(told.wait, 30.0)
    assert crew.close(30.0) == 0


async def test_cancelling_the_waiter_tells_the_work() -> None:
    crew = Crew("test")
    entered = threading.Event()
    seen: list[bool] = []

    def work(left: threading.Event) -> None:
        entered.set()
        seen.append(left.wait(30.0))

    task = asyncio.ensure_future(crew.run(work, 60.0))
    await asyncio.to_thread(entered.wait, 30.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert crew.close(30.0) == 0 and seen == [True]


async def test_close_releases_the_waiter_at_once() -> None:
    crew = Crew("test")
    entered, free = threading.Event(), threading.Event()

    def work(left: threading.Event) -> None:
        entered.set()
        free.wait()

    task = asyncio.ensure_future(crew.run(work, 60.0))
    await asyncio.to_thread(entered.wait, 30.0)
    assert crew.close(0.01) == 1  # it does not look at `left`
    with pytest.raises(Abandoned, match="closed"):
        await task
    free.set()
    assert crew.close(30.0) == 0


def test_work_that_outlives_its_loop_ends_quietly() -> None:
    crew = Crew("test")
    free = threading.Event()

    async def leave() -> None:
        with pytest.raises(Abandoned):
            await crew.run(lambda left: free.wait(), 0.01)

    asyncio.run(leave())
    free.set()
    assert crew.close(30.0) == 0  # an unhandled error in the thread would fail the test


def test_deadlines() -> None:
    deadline = Deadline(100.0)
    assert 0.0 < deadline.sooner(10.0).left() <= 90.0
    assert 0.0 < deadline.within(5.0).left() <= 5.0
    assert deadline.within(500.0).left() <= 100.0
    assert Deadline(-1.0).left() == 0.0
