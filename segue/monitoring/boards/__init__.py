"""The five dashboards, and the metrics that are on none of them."""

from segue.monitoring.boards.envpool import ENVPOOL
from segue.monitoring.boards.learner import LEARNER
from segue.monitoring.boards.overview import OVERVIEW
from segue.monitoring.boards.rollout import ROLLOUT
from segue.monitoring.boards.weightsync import WEIGHTSYNC
from segue.monitoring.panels import Dashboard

DASHBOARDS: tuple[Dashboard, ...] = (OVERVIEW, ROLLOUT, LEARNER, ENVPOOL, WEIGHTSYNC)

EXEMPT: dict[str, str] = {}
"""Metrics of the catalogue that need not be on a dashboard, and why."""
