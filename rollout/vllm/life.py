"""Whether vLLM lives, and waiting for it: every call has a deadline, and the first cause of death is told to all who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rollout.vllm.silence import Silence
from segue.ports.engine import EngineDead

T = TypeVar("T")


class Life:
    """One life of an engine. `on_death` is called once, with why.

    `step_seconds`: vLLM is dead when it says nothing for longer than this while something is expected of it.
    """

    def __init__(self, step_seconds: float, on_death: Callable[[str], None]) -> None:
        self._step_seconds = step_seconds
        self._on_death = on_death
        self._dead: EngineDead | None = None
        self._death: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.silence = Silence(step_seconds, lambda: self.die(f"vLLM said nothing for {step_seconds:g} s"))

    @property
    def dead(self) -> bool:
        return self._dead is not None

    def begin(self) -> None:
        """The engine is being started."""
        assert self._death is None, "started twice"
        self._death = asyncio.get_running_loop().create_future()

    def die(self, why: str) -> None:
        """The first cause counts."""
        if self._dead is not None:
            return
        self._dead = EngineDead(why)
        self.silence.rest()
        self._on_death(why)
        if self._death is not None and not self._death.done():
            self._death.set_result(None)

    def check(self) -> None:
        """Raises `EngineDead` once it is dead."""
        if self._dead is not None:
            raise EngineDead(str(self._dead))  # one exception for each who hears of it
        if self._death is None:
            raise RuntimeError("the engine was used before `start` had returned")

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose failure ends the engine."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.die(f"{type(error).__name__}: {error}")

    async def answer(self, call: Coroutine[Any, Any, T], seconds: float = 0.0) -> T:
        """vLLM's answer; its death or its silence ends the engine, and raises `EngineDead`. `seconds` are granted on top."""
        assert self._death is not None
        patience = self._step_seconds + seconds
        task = asyncio.ensure_future(call)
        either: list[asyncio.Future[Any]] = [task, self._death]
        await asyncio.wait(either, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            self.die(f"vLLM did not answer within {patience:g} s")
            self.check()
        try:
            return task.result()
        except Exception as error:
            self.die(f"{type(error).__name__}: {error}")
            raise EngineDead(str(self._dead)) from error

    async def end(self) -> None:
        """End all tasks."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
