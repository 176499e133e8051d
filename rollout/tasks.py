"""Supervised tasks: none dies unheard (faults.md F60)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Tasks:
    """Starts tasks and watches them. The first exception of any goes to `on_death(name, error)`; cancellation is no death."""

    def __init__(self, on_death: Callable[[str, BaseException], None]) -> None:
        self._on_death = on_death
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start `work` as a task called `name`."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def kill(self, spare: asyncio.Task[Any] | None = None) -> list[asyncio.Task[Any]]:
        """Cancel what still runs, the caller and `spare` aside."""
        others = [task for task in self._running if task not in (_current(), spare)]
        for task in others:
            task.cancel()
        return others

    async def cancel(self) -> None:
        """Cancel what still runs (the caller aside) and wait until it has ended."""
        while others := self.kill():  # again for what they start while they end
            await asyncio.wait(others)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_death(task.get_name(), error)


def _current() -> asyncio.Task[Any] | None:
    """The task that runs now; None in a callback of the loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
