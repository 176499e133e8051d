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
        self._metrics = metrics
        self._reported = self._discarded = self._preempted = self._evicted = 0
        self._reported_causes: dict[str, tuple[int, float]] = {}

    def refresh(self, episodes: int, pending_events: int) -> dict[str, float]:
        """Totals by name: `prefill_<cause>`, `seconds_<cause>` and `cached_tokens` are the ledger's, the rest the engine's."""
        engine, metrics = self._engine.counts(), self._metrics
        self._ledger.settle(engine)
        metrics.add("segue_engine_prefill_tokens_total", engine.prefill_tokens - self._reported)
        self._reported = engine.prefill_tokens
        metrics.add("segue_discarded_tokens_total", engine.discarded_tokens - self._discarded, reason="unread")
        self._discarded = engine.discarded_tokens
        metrics.add("segue_engine_preemptions_total", engine.preemptions - self._preempted)
        metrics.add("segue_engine_evictions_total", engine.evictions - self._evicted)
        self._preempted, self._evicted = engine.preemptions, engine.evictions
        metrics.set("segue_requests_running", engine.running)
        metrics.set("segue_episodes_running", episodes)
        metrics.set("segue_queue_depth", engine.waiting, queue="engine")
        metrics.set("segue_queue_depth", pending_events, queue="outbox")
        figures: dict[str, float] = {}
        for cause, tokens in self._ledger.prefilled.items():
            seconds = self._ledger.seconds[cause]
            known = self._reported_causes.get(cause, (0, 0.0))
            if known != (tokens, seconds):
                metrics.add("segue_prefill_tokens_total", tokens - known[0], cause=cause)
                metrics.add("segue_prefill_seconds_total", seconds - known[1], cause=cause)
                self._reported_causes[cause] = tokens, seconds
            figures[f"prefill_{cause}"], figures[f"seconds_{cause}"] = float(tokens), seconds
        return figures | {
            "prefill_tokens": float(engine.prefill_tokens),
            "cached_tokens": float(self._ledger.cached),
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
