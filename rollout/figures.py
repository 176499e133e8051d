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
        self._reported = self._discarded = 0

    def refresh(self, episodes: int, pending_events: int) -> dict[str, float]:
        """Totals by name: `prefill_<cause>` and `cached_tokens` are the ledger's, everything else the engine's."""
        engine, metrics = self._engine.counts(), self._metrics
        metrics.add("segue_engine_prefill_tokens_total", engine.prefill_tokens - self._reported)
        self._reported = engine.prefill_tokens
        metrics.add("segue_discarded_tokens_total", engine.discarded_tokens - self._discarded, reason="unread")
        self._discarded = engine.discarded_tokens
        metrics.set("segue_requests_running", engine.running)
        metrics.set("segue_episodes_running", episodes)
        metrics.set("segue_queue_depth", engine.waiting, queue="engine")
        metrics.set("segue_queue_depth", pending_events, queue="outbox")
        figures = {f"prefill_{cause}": float(n) for cause, n in self._ledger.prefilled.items()}
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
