"""What ends an attempt's waits before their time: a drop at once, a park order where one may be obeyed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Dropped(Exception):
    """The attempt was told to stop: nothing of it is sent any more."""


class Parking(Exception):
    """A wait that a park order may end was ended by one."""


class Interrupts:
    """The orders that one attempt has got. `abort` ends the request that its engine has, if any."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self.dropped = ""
        self.parking = False
        self._abort = abort
        self._signal: asyncio.Future[None] | None = None

    def drop(self, reason: str) -> None:
        """Stop and discard. The first reason stays."""
        self.dropped = self.dropped or reason
        self.ring()

    def park(self) -> None:
        """Let go as soon as nothing is lost by it."""
        self.parking = True
        self.ring()

    def ring(self) -> None:
        """Whoever waits looks again, and a running request ends."""
        if self._signal is not None and not self._signal.done():
            self._signal.set_result(None)
        self._abort()

    def check(self) -> None:
        """Raises `Dropped` if the attempt was."""
        if self.dropped:
            raise Dropped

    async def wait(self, future: asyncio.Future[Any], parkable: bool) -> None:
        """Until `future` is done, its deadline being its owner's. Raises `Dropped`; where it is `parkable`, `Parking`."""
        while not future.done():
            signal = self._signal = asyncio.get_running_loop().create_future()
            self.check()
            if parkable and self.parking:
                raise Parking

            def woken(_: object, signal: asyncio.Future[None] = signal) -> None:
                if not signal.done():
                    signal.set_result(None)

            future.add_done_callback(woken)
            try:
                await signal
            finally:
                future.remove_done_callback(woken)
        self.check()
