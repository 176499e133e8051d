"""One attempt at a transfer as the event loop sees it: a thread works, and somebody waits for it until something newer comes."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

from segue.ports.transfer import Transfer
from segue.ports.weights import TransferFailed
from weightsync.crew import Abandoned
from weightsync.turns import failure_sentence

T = TypeVar("T")
R = TypeVar("R")


class Attempt(Generic[R]):
    """`work` is the thread's result, of `member`'s part in `transfer`."""

    def __init__(self, transfer: Transfer, member: str, work: asyncio.Future[R]) -> None:
        self._transfer = transfer
        self._member = member
        self._work = work
        self._superseded: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def supersede(self, why: str) -> None:
        """Nobody waits for it any more, for a reason that those who do are told."""
        if not self._superseded.done():
            self._superseded.set_result(why)

    async def result(self) -> R:
        """What the thread made of it. Raises `TransferFailed`, by the deadline."""
        await self._wait()
        return self._finished()

    async def first(self, event: asyncio.Future[T]) -> T:
        """What comes of `event`, which the thread brings about before it ends. Raises `TransferFailed`."""
        try:
            await self._wait(event)
            if event.done():
                return event.result()
            self._finished()
            raise AssertionError("the transfer ended before its time")
        finally:
            event.cancel()

    async def _wait(self, *events: asyncio.Future[Any]) -> None:
        either: list[asyncio.Future[Any]] = [self._work, self._superseded, *events]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._superseded.done():
            raise TransferFailed(failure_sentence(self._transfer, self._member, self._superseded.result()))

    def _finished(self) -> R:
        try:
            return self._work.result()
        except Abandoned as error:
            why = f"the weight sender at {self._transfer.address} did not answer by the deadline ({error})"
            raise TransferFailed(failure_sentence(self._transfer, self._member, why)) from error

    def give_up(self) -> None:
        """The thread works for nobody: it gives up where it can. Idempotent."""
        if not self._work.cancel() and not self._work.cancelled():
            self._work.exception()  # superseded just as it failed: nobody else will ask for it
