"""Signs of life: a heartbeat that `/health` and an alert read, and how late an event loop runs its timers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from segue.metrics.registry import Metrics


class Heartbeat:
    """When the process last showed a sign of life: by the monotonic clock for its age, by the wall clock for the metric."""

    def __init__(
        self, metrics: Metrics, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._metrics = metrics
        self._monotonic = monotonic
        self._wall = wall
        self.beat()

    def beat(self) -> None:
        """A sign of life now."""
        self._last = self._monotonic()
        self._metrics.set("segue_worker_heartbeat_timestamp_seconds", self._wall())

    def age(self) -> float:
        """Seconds since the last sign of life."""
        return self._monotonic() - self._last


class LoopMonitor:
    """Observes how late the running loop runs a timer, and beats: one sparse timer, `interval` seconds apart.

    The one timer of a role that is armed with nothing pending: a stuck loop cannot report itself otherwise. Not for a loop with
    a logical clock, which it would keep running for ever.
    """

    def __init__(self, metrics: Metrics, heartbeats: tuple[Heartbeat, ...] = (), interval: float = 1.0) -> None:
        self._metrics = metrics
        self._heartbeats = heartbeats
        self._interval = interval
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin on the running loop."""
        assert self._timer is None, "already started"
        self._arm(asyncio.get_running_loop())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + self._interval
        self._timer = loop.call_at(due, self._tick, loop, due)

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._metrics.observe("segue_event_loop_lag_seconds", max(0.0, loop.time() - due))
        for heartbeat in self._heartbeats:
            heartbeat.beat()
        self._arm(loop)
