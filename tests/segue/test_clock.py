"""The logical loop: jumps, keeps order, notices a deadlock, and waits for executors with the clock standing still."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.clock import Deadlock, LogicalCompute, LogicalLoop, ThreadCompute, now

T = TypeVar("T")


@pytest.fixture
def loop() -> Iterator[LogicalLoop]:
    loop = LogicalLoop()
    yield loop
    loop.close()


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=LogicalLoop) as runner:
        return runner.run(main)


def test_the_internals_that_the_loop_builds_on_are_there(loop: LogicalLoop) -> None:
    """Pins what a new Python version might move; pyproject.toml allows 3.11 to 3.13."""
    assert (3, 11) <= sys.version_info < (3, 14)
    for name in ("_ready", "_stopping", "_selector", "_process_events", "_check_closed", "_run_once"):
        assert hasattr(loop, name), name
    handle = loop.call_later(1.0, print)
    assert hasattr(handle, "_scheduled") and hasattr(handle, "_run")


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> list[float]:
        seen = [now()]
        await asyncio.sleep(1000.0)
        seen.append(now())
        await asyncio.sleep(0)
        seen.append(now())
        return seen

    assert run(main()) == [0.0, 1000.0, 1000.0]


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), max_size=40))
def test_timers_run_by_time_and_equal_times_first_in_first_out(delays: list[int]) -> None:
    async def main() -> list[tuple[float, int]]:
        loop = asyncio.get_running_loop()
        ran: list[tuple[float, int]] = []
        for index, delay in enumerate(delays):
            loop.call_later(delay, lambda i: ran.append((now(), i)), index)
        await asyncio.sleep(6)
        return ran

    assert run(main()) == sorted((float(delay), index) for index, delay in enumerate(delays))


def test_a_timer_armed_by_a_timer_for_the_same_moment_runs_at_that_moment() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        ran: list[tuple[str, float]] = []

        def first() -> None:
            ran.append(("first", now()))
            loop.call_later(0.0, lambda: ran.append(("nested", now())))

        loop.call_later(2.0, first)
        loop.call_later(2.0, lambda: ran.append(("second", now())))
        loop.call_at(1.0, lambda: ran.append(("early", now())))
        await asyncio.sleep(2.5)
        return ran

    assert run(main()) == [("early", 1.0), ("first", 2.0), ("second", 2.0), ("nested", 2.0)]


def test_a_due_timer_runs_while_others_keep_the_loop_busy() -> None:
    async def main() -> int:
        ran: list[float] = []
        asyncio.get_running_loop().call_later(0.0, lambda: ran.append(now()))
        rounds = 0
        while not ran and rounds < 1000:
            await asyncio.sleep(0)
            rounds += 1
        return rounds

    assert run(main()) < 3


def test_time_never_goes_back() -> None:
    async def main() -> float:
        await asyncio.sleep(5.0)
        asyncio.get_running_loop().call_at(1.0, lambda: None)
        await asyncio.sleep(0.0)
        return now()

    assert run(main()) == 5.0


def test_cancelled_timers_neither_run_nor_move_the_clock() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        for delay in (1.0, 50.0, 1e9):
            loop.call_later(delay, pytest.fail, "a cancelled timer ran").cancel()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 7.0)
        await asyncio.wait_for(asyncio.sleep(1.0), 1e6)
        return now()

    assert run(main()) == 8.0


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(0, 400), st.floats(0, 1))
def test_many_cancelled_timers_are_swept_and_the_others_still_run(seed: int, count: int, share: float) -> None:
    rng = random.Random(seed)
    plan = [(rng.randrange(10), rng.random() < share, rng.random() < 0.2) for _ in range(count)]

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        ran: list[int] = []
        handles = [loop.call_later(10 + delay, ran.append, index) for index, (delay, _, _) in enumerate(plan)]
        for handle, (_, cancel, twice) in zip(handles, plan, strict=True):
            if cancel:
                handle.cancel()
            if cancel and twice:
                handle.cancel()
        await asyncio.sleep(20)
        for handle in handles:
            handle.cancel()  # long gone: must not be counted again
        assert isinstance(loop, LogicalLoop) and loop._cancelled == 0 and not loop._timers
        return ran

    alive = [(delay, index) for index, (delay, cancel, _) in enumerate(plan) if not cancel]
    assert run(main()) == [index for _, index in sorted(alive)]


def test_repeated_time_outs_do_not_pile_up_timers() -> None:
    async def main() -> int:
        most = 0
        loop = asyncio.get_running_loop()
        assert isinstance(loop, LogicalLoop)
        for _ in range(5000):
            await asyncio.wait_for(asyncio.sleep(0), 1e6)
            most = max(most, len(loop._timers))
        return most

    assert run(main()) < 300


def test_a_deadlock_is_an_error_and_not_a_hang() -> None:
    async def main() -> None:
        await asyncio.gather(asyncio.Event().wait(), asyncio.Event().wait())

    with pytest.raises(Deadlock, match="every task waits and no timer is armed"):
        run(main())


def test_a_deadlock_behind_cancelled_timers_is_noticed() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(5.0, print).cancel()
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(main())


def test_the_loop_can_be_stopped_and_run_again(loop: LogicalLoop) -> None:
    ran: list[float] = []
    loop.call_later(1.0, lambda: ran.append(loop.time()))
    loop.call_later(1.0, loop.stop)
    loop.call_later(2.0, lambda: ran.append(loop.time()))
    loop.run_forever()
    assert ran == [1.0]
    loop.stop()
    loop.run_forever()
    assert ran == [1.0], "a loop that is told to stop takes no time"
    loop.run_until_complete(asyncio.sleep(5.0))
    assert ran == [1.0, 2.0]


def test_a_closed_loop_takes_no_timers(loop: LogicalLoop) -> None:
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1.0, print)


def test_the_clock_stands_still_while_an_executor_works() -> None:
    release, entered = threading.Event(), threading.Event()

    def work() -> int:
        entered.set()
        assert release.wait(30.0)
        return 7

    def let_go() -> None:
        assert entered.wait(30.0)
        release.set()

    async def main() -> tuple[int, float, list[float]]:
        loop = asyncio.get_running_loop()
        ticks: list[float] = []
        loop.call_later(3.0, lambda: ticks.append(now()))
        with ThreadPoolExecutor(1) as pool:
            future = loop.run_in_executor(pool, work)
            threading.Thread(target=let_go).start()
            result = await future
        return result, now(), ticks

    assert run(main()) == (7, 0.0, [])


def test_the_default_executor_works_and_is_shut_down() -> None:
    async def main() -> list[int]:
        return await asyncio.gather(*(asyncio.to_thread(pow, n, 2) for n in range(20)))

    assert run(main()) == [n * n for n in range(20)]


def test_an_error_in_an_executor_comes_back_and_the_clock_goes_on() -> None:
    def fail() -> None:
        raise OSError("no disk")

    async def main() -> float:
        with pytest.raises(OSError, match="no disk"):
            await asyncio.to_thread(fail)
        await asyncio.sleep(2.0)
        return now()

    assert run(main()) == 2.0


def test_signal_handlers_run_although_the_loop_never_waits() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, stop.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        while not stop.is_set():
            await asyncio.sleep(1.0)
            assert now() < 10_000, "the signal was never looked at"
        loop.remove_signal_handler(signal.SIGUSR1)
        return now()

    assert run(main()) < 1_000


def test_logical_compute_runs_one_after_another_and_takes_its_cost() -> None:
    async def main() -> list[tuple[str, float]]:
        compute = LogicalCompute()
        ran: list[tuple[str, float]] = []

        async def job(name: str, cost: float) -> None:
            await compute.run(lambda: ran.append((name, now())), cost)
            ran.append((f"{name} done", now()))

        await asyncio.gather(job("a", 2.0), job("b", 3.0), job("c", 0.0))
        compute.close()
        return ran

    assert run(main()) == [("a", 0.0), ("a done", 2.0), ("b", 2.0), ("b done", 5.0), ("c", 5.0), ("c done", 5.0)]


def test_logical_compute_goes_on_after_an_error() -> None:
    async def main() -> int:
        compute = LogicalCompute()
        with pytest.raises(ZeroDivisionError):
            await compute.run(lambda: 1 // 0, 1.0)
        return await compute.run(lambda: 5, 1.0)

    assert run(main()) == 5


async def test_thread_compute_runs_in_one_thread_in_order_and_leaves_the_loop_free() -> None:
    compute = ThreadCompute("worker")
    ran: list[int] = []
    gate = threading.Event()

    def work(n: int) -> str:
        assert gate.wait(30.0)
        ran.append(n)
        return threading.current_thread().name

    jobs = [asyncio.create_task(compute.run(partial(work, n), cost=9.0)) for n in range(5)]
    await asyncio.sleep(0)
    gate.set()  # the loop still runs, although the worker waits
    names = set(await asyncio.gather(*jobs))
    compute.close()
    assert ran == [0, 1, 2, 3, 4] and len(names) == 1 and names.pop().startswith("worker")


def test_two_runs_are_equal() -> None:
    async def main() -> list[tuple[float, int]]:
        ran: list[tuple[float, int]] = []

        async def worker(n: int) -> None:
            for step in range(10):
                await asyncio.sleep((n * 7 + step * 3) % 5)
                ran.append((now(), n))

        await asyncio.gather(*(worker(n) for n in range(20)))
        return ran

    assert run(main()) == run(main())
