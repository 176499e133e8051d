"""The way of chunks from an engine to the consumer of a request."""

from __future__ import annotations

import asyncio
from collections import deque

from segue.ports.engine import Chunk


class Outbox:
    """Chunks for one consumer, in order. Never blocks the producer; a failure comes after the chunks already put in."""

    __slots__ = ("_chunks", "_error", "_waiter")

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def unread(self) -> int:
        """Tokens that nobody has taken yet."""
        return sum(len(chunk.tokens) for chunk in self._chunks)

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._wake()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Chunk:
        """The next chunk. Waits until the engine puts one in or fails: a paused engine's deadline is its owner's."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._chunks.popleft()
