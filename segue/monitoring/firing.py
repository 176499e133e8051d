"""The alerts of a run as they are now, from the Prometheus that `segue monitor` runs for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from segue.metrics.scrape import get
from segue.monitoring.serve import address_file
from segue.rundir import RunDir

ASK_SECONDS = 2.0


@dataclass(frozen=True)
class Firing:
    """An alert whose condition holds: `firing`, or `pending` as long as that has not held long enough. `since`: Unix seconds."""

    name: str
    state: str
    severity: str
    since: float
    text: str
    runbook: str


def alerts_of(run: RunDir) -> tuple[list[Firing], str]:
    """The alerts of the run, newest first, and "" or else one sentence on why nothing is known of them."""
    try:
        address = address_file(run).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return [], f"not watched: `segue monitor {run.path}` starts a Prometheus that evaluates them"
    try:
        return read_alerts(json.loads(get(f"{address}/api/v1/alerts", ASK_SECONDS)), run.name), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [], f"not known: the Prometheus at {address} does not answer (`segue monitor {run.path}` starts one)"


def read_alerts(answer: Mapping[str, Any], run: str) -> list[Firing]:
    """The alerts of one run in Prometheus' answer to /api/v1/alerts, newest first. Raises KeyError, TypeError,
    ValueError or AttributeError for another answer."""
    found = [
        Firing(
            name=alert["labels"]["alertname"],
            state=alert["state"],
            severity=alert["labels"].get("severity", ""),
            since=datetime.fromisoformat(alert["activeAt"]).timestamp(),
            text=alert["annotations"].get("description", ""),
            runbook=alert["annotations"].get("runbook_url", ""),
        )
        for alert in answer["data"]["alerts"]
        if alert["labels"].get("run") == run
    ]
    return sorted(found, key=lambda alert: -alert.since)
