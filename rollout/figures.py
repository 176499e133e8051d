"""The figures of a node: what its engine and its ledger count, for exchanges, status calls and metrics."""

from __future__ import annotations

from rollout.ledger import Ledger
from segue.metrics import Metrics
from segue.ports.engine import Engine


class Figures:
    """Reads the totals; gauges and the engine's counters are brought up to date at every reading."""

    def __init__(self, engine: Engine, ledger: Ledger, metrics: Metrics) -> None:
        self._engine = engine
        self._ledger = ledger
        self._engine_prefill = metrics.counter("segue_engine_prefill_tokens_total")
        self._unread = metrics.counter("segue_discarded_tokens_total", reason="unread")
        self._preemptions = metrics.counter("segue_engine_preemptions_total")
        self._evictions = metrics.counter("segue_engine_evictions_total")
        self._running = metrics.gauge("segue_requests_running")
        self._episodes = metrics.gauge("segue_episodes_running")
        self._waiting = metrics.gauge("segue_queue_depth", queue="engine")
        self._pending = metrics.gauge("segue_queue_depth", queue="outbox")
        self._causes = {
            cause: (
                f"prefill_{cause}",
                f"seconds_{cause}",
                metrics.counter("segue_prefill_tokens_total", cause=cause),
                metrics.counter("segue_prefill_seconds_total", cause=cause),
            )
            for cause in ledger.prefilled
        }
        self._reported = self._discarded = self._preempted = self._evicted = 0
        self._reported_causes: dict[str, tuple[int, float]] = dict.fromkeys(ledger.prefilled, (0, 0.0))
        self._reported_phases: dict[str, float] = {}
        self._metrics = metrics
        self._read: tuple[object, ...] = ()
        self._figures: dict[str, float] = {}

    def refresh(self, episodes: int, pending_events: int) -> dict[str, float]:
        """Totals by name: `prefill_<cause>`, `seconds_<cause>` and `cached_tokens` are the ledger's, the rest the engine's.

        The same object as long as nothing has changed: do not change it.
        """
        engine, ledger = self._engine.counts(), self._ledger
        read = (engine, episodes, pending_events, ledger.total, ledger.cached)
        if read == self._read:
            return self._figures
        ledger.settle(engine)
        self._engine_prefill.add(engine.prefill_tokens - self._reported)
        self._reported = engine.prefill_tokens
        self._unread.add(engine.discarded_tokens - self._discarded)
        self._discarded = engine.discarded_tokens
        self._preemptions.add(engine.preemptions - self._preempted)
        self._evictions.add(engine.evictions - self._evicted)
        self._preempted, self._evicted = engine.preemptions, engine.evictions
        for phase, spent in engine.phases.items():
            self._metrics.add("segue_engine_seconds_total", spent - self._reported_phases.get(phase, 0.0), phase=phase)
        self._reported_phases = engine.phases
        self._running.set(engine.running)
        self._episodes.set(episodes)
        self._waiting.set(engine.waiting)
        self._pending.set(pending_events)
        self._read = (engine, episodes, pending_events, ledger.total, ledger.cached)
        figures: dict[str, float] = {}
        for cause, tokens in ledger.prefilled.items():
            seconds = ledger.seconds[cause]
            known = self._reported_causes[cause]
            name_of_tokens, name_of_seconds, by_tokens, by_seconds = self._causes[cause]
            if known != (tokens, seconds):
                by_tokens.add(tokens - known[0])
                by_seconds.add(seconds - known[1])
                self._reported_causes[cause] = tokens, seconds
            figures[name_of_tokens], figures[name_of_seconds] = float(tokens), seconds
        self._figures = figures | {
            "prefill_tokens": float(engine.prefill_tokens),
            "cached_tokens": float(ledger.cached),
            "decode_tokens": float(engine.decode_tokens),
            "prefill_seconds": engine.prefill_seconds,
            "decode_seconds": engine.decode_seconds,
            "busy_seconds": engine.busy_seconds,
            "running": float(engine.running),
            "waiting": float(engine.waiting),
            "preemptions": float(engine.preemptions),
            "evictions": float(engine.evictions),
            "episodes": float(episodes),
        }
        return self._figures
