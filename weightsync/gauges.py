"""What a sender shows of itself: its states (one activity per publish and transfer) and its metrics.

Called from the event loop and from the learner's training thread. At the other end the node keeps states and phases, because
it alone sees drain, pause and load (`rollout.update`); a receiver adds its bytes and the seconds of the transfer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from segue.metrics.registry import Metrics
from segue.metrics.states import ActivityClock

PRECEDENCE = ("load", "transfer", "stage", "wait_version")
"""States of the `ActivityClock` that the wiring hands to a sender (it never loads, but every target shows every state)."""


class Gauges:
    """Metrics and state clock of one sender. `now` times phases, `wall` stamps the start of a transfer."""

    def __init__(
        self,
        metrics: Metrics,
        clock: ActivityClock,
        now: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._now = now
        self._wall = wall
        self._lock = threading.Lock()
        self._started: dict[int, float] = {}
        clock.begin("wait_version")  # for good: it is last in precedence, so it shows when nothing else goes on

    @contextmanager
    def doing(self, state: str) -> Iterator[None]:
        """One more activity is in `state` inside the block."""
        with self._lock:
            self._clock.begin(state)
        try:
            yield
        finally:
            with self._lock:
                self._clock.end(state)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """A publication: state `stage`, phase `gather`."""
        began = self._now()
        with self.doing("stage"):
            yield
        self.took("gather", self._now() - began)

    @contextmanager
    def transferring(self, transfer: int) -> Iterator[None]:
        """A transfer: state `transfer`, and since when the oldest one runs."""
        with self._lock:
            self._started[transfer] = self._wall()
            self._show_started()
        try:
            with self.doing("transfer"):
                yield
        finally:
            with self._lock:
                self._started.pop(transfer, None)
                self._show_started()

    def _show_started(self) -> None:
        self._metrics.set("segue_weight_sync_started_timestamp_seconds", min(self._started.values(), default=0.0))

    def took(self, phase: str, seconds: float) -> None:
        self._metrics.observe("segue_weight_sync_seconds", seconds, phase=phase)

    def moved(self, nbytes: int) -> None:
        self._metrics.add("segue_weight_sync_bytes_total", nbytes)

    def failed(self, phase: str) -> None:
        self._metrics.add("segue_weight_sync_failures_total", phase=phase)
