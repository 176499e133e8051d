"""What only a baseline has: a barrier over the whole batch before every turn (interaction by "batch").

A wrapper around a pool's workers. An observation that another turn follows on is held back until every episode of the batch that
goes on has its own. It makes sense in sync mode alone, where the episodes under way are one batch, all of which run at once;
episodes may not fail, since a barrier waits for whoever is lost.
"""

from __future__ import annotations

from collections.abc import Callable

from envpool.messages import Acted, Call, LoadedSuite, LoadFailed, Observed, Reply
from envpool.workers import Sink, Workers


class Barrier:
    """Shared by all pools. A batch has `size` episodes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._joined = 0
        self._going_on = 0
        self._held: list[Callable[[], None]] = []
        self.turns = 0

    def begins(self, release: Callable[[], None]) -> None:
        """An episode has its first observation."""
        self._joined += 1
        self._going_on += 1
        self._hold(release)

    def goes_on(self, release: Callable[[], None]) -> None:
        """An episode has an observation that another turn follows on."""
        self._hold(release)

    def ends(self) -> None:
        """An episode took its last turn."""
        self._going_on -= 1
        if self._going_on == 0 and self._joined == self._size:
            self._joined = 0
        self._open()

    def _hold(self, release: Callable[[], None]) -> None:
        self._held.append(release)
        self._open()

    def _open(self) -> None:
        if self._held and self._joined == self._size and len(self._held) == self._going_on:
            self.turns += 1
            held, self._held = self._held, []
            for release in held:
                release()


class BarrierWorkers:
    """`envpool.workers.Workers` behind a barrier: the `Sink` of the workers it wraps."""

    def __init__(self, inner: Workers, barrier: Barrier) -> None:
        self._inner = inner
        self._barrier = barrier
        self._sink: Sink | None = None

    def open(self, sink: Sink) -> None:
        self._sink = sink
        self._inner.open(self)

    def spawn(self, seat: int, generation: int) -> None:
        self._inner.spawn(seat, generation)

    def send(self, seat: int, generation: int, call: Call) -> None:
        self._inner.send(seat, generation, call)

    def kill(self, seat: int, generation: int) -> None:
        self._inner.kill(seat, generation)

    async def close(self) -> None:
        self._sink = None
        await self._inner.close()

    def said(self, seat: int, generation: int, body: LoadedSuite | LoadFailed | Reply) -> None:
        """See `Sink`."""

        def release() -> None:
            if self._sink is not None:
                self._sink.said(seat, generation, body)

        if isinstance(body, Observed):
            self._barrier.begins(release)
        elif isinstance(body, Acted) and not (body.result.terminated or body.result.truncated):
            self._barrier.goes_on(release)
        else:
            release()
            if isinstance(body, Acted):
                self._barrier.ends()

    def lost(self, seat: int, generation: int, detail: str) -> None:
        """See `Sink`."""
        if self._sink is not None:
            self._sink.lost(seat, generation, detail)

    def gone(self, seat: int, generation: int) -> None:
        """See `Sink`."""
        if self._sink is not None:
            self._sink.gone(seat, generation)
