"""What weight sync shows of itself: its states (one activity per publish, transfer, stage and load) and its metrics.

Called from the event loop, from the learner's training thread and from transfer threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from segue.metrics.registry import Metrics
from segue.metrics.states import ActivityClock

PRECEDENCE = ("load", "transfer", "stage", "wait_version")
"""States of the `ActivityClock` that the wiring hands to a sender or receiver."""


class Activity:
    """One thing going on, in one state until it ends. After `end`, what a thread left behind still calls changes nothing."""

    def __init__(self, gauges: Gauges, state: str) -> None:
        self._gauges = gauges
        self.state: str | None = None
        self.over = False
        self.enter(state)

    def enter(self, state: str) -> None:
        """Be in `state` from now on."""
        self._gauges.move(self, state)

    def end(self) -> None:
        self._gauges.move(self, None)


class Gauges:
    """Metrics and state clock of one sender or receiver. `now` times phases, `wall` stamps the start of a transfer."""

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

    def begin(self, state: str) -> Activity:
        """Start an activity in `state`."""
        return Activity(self, state)

    @contextmanager
    def doing(self, state: str, phase: str) -> Iterator[None]:
        """An activity in `state`; its duration is observed as `phase` unless it raises."""
        began = self._now()
        activity = self.begin(state)
        try:
            yield
        finally:
            activity.end()
        self.took(phase, self._now() - began)

    def move(self, activity: Activity, state: str | None) -> None:
        """Move an activity to another state, or end it (None)."""
        with self._lock:
            if activity.over:
                return
            if state is not None:
                self._clock.begin(state)
            if activity.state is not None:
                self._clock.end(activity.state)
            activity.state, activity.over = state, state is None

    def transfer_began(self, transfer: int) -> None:
        """A transfer runs: the oldest one's start is shown."""
        with self._lock:
            self._started[transfer] = self._wall()
            self._show_started()

    def transfer_ended(self, transfer: int) -> None:
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
