"""Something done with several roles at once, and the deadline of a start, whose sentence says who is late."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

from segue.cluster.role_handle import RoleHandle, first_cause
from segue.errors import RunFailed

log = logging.getLogger("segue.cluster.driver")

T = TypeVar("T")
Do = Callable[[RoleHandle], Coroutine[Any, Any, Any]]
STILL_SECONDS = 30.0
"""So often somebody who waits for a start is told who has not come yet."""


def _nobody(names: list[str]) -> None:
    pass


async def for_each(
    actors: Iterable[RoleHandle],
    do: Do,
    late: Callable[[list[str]], None] = _nobody,
    still: Callable[[list[str]], None] = _nobody,
) -> None:
    """`do` for all at once; the first failure is raised at once, deaths before others. `late` is told at the end, however it
    comes, for whom it was not done; `still`, every `STILL_SECONDS` until then."""
    tasks = {asyncio.create_task(do(actor)): actor.name for actor in actors}
    if not tasks:
        return
    try:
        while True:
            done, pending = await asyncio.wait(tasks, timeout=STILL_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            if not pending or any(task.exception() is not None for task in done):
                break
            still(sorted(tasks[task] for task in pending))
        failed = [task for task in done if task.exception() is not None]
        if failed:
            raise await first_cause(failed, list(tasks))
    finally:
        late(sorted(name for task, name in tasks.items() if not task.done()))
        for task in tasks:
            task.cancel()


class Start:
    """One start of roles: `what` is how its sentence begins, `seconds` is `cluster.start_seconds`, `say` puts a line on the
    console while it takes long."""

    def __init__(self, what: str, seconds: float, logs: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self._what = what
        self._seconds = seconds
        self._logs = logs
        self._say = say
        self._late: list[str] = []

    async def within(self, work: Awaitable[T]) -> T:
        """Raises `RunFailed` where `work` takes too long."""
        try:
            async with asyncio.timeout(self._seconds):
                return await work
        except TimeoutError:
            waited = f" ({', '.join(self._late)} had not come yet)" if self._late else ""
            raise RunFailed(
                "start",
                f"{self._what} took longer than cluster.start_seconds = {self._seconds:g}{waited}: raise it, for instance "
                f"with --set cluster.start_seconds=600, or look into {self._logs}.",
            ) from None

    async def stage(self, actors: Iterable[RoleHandle], do: Do, done_is: str) -> None:
        """`for_each`, as a part of the start; `done_is` goes to the log."""
        began = asyncio.get_running_loop().time()
        await for_each(actors, do, self._note, lambda names: self._say(f"still starting: {', '.join(names)}"))
        log.info("%s after another %.1f s", done_is, asyncio.get_running_loop().time() - began)

    def _note(self, late: list[str]) -> None:
        self._late = late
