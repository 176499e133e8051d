"""What Segue measures: the catalogue, the registry that only knows the catalogue, clocks of states, the exporter."""

from segue.metrics.registry import BuildInfo, Metrics
from segue.metrics.series import Counter, Gauge, Histogram
from segue.metrics.states import ActivityClock, SlotClock, StateClock

__all__ = ["ActivityClock", "BuildInfo", "Counter", "Gauge", "Histogram", "Metrics", "SlotClock", "StateClock"]
