"""Panels and dashboards as data, and the JSON that Grafana provisions of them.

Every panel has a unit and a description. Dashboards have a fixed `uid` and no `id`, and name their data source by a variable, so
that any Grafana takes them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

UNITS = {
    "ratio": "percentunit",
    "seconds": "s",
    "bytes": "bytes",
    "bytes/s": "Bps",
    "cores": "none",
    "count": "short",
    "per second": "short",
    "tokens/s": "short",
    "versions": "none",
    "nats": "none",
    "number": "none",
}
"""Ours, and what Grafana calls them."""
SCHEMA, COLUMNS, WIDTH, HEIGHT = 39, 24, 8, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    """One expression of a panel; `legend` names its series, `{{label}}` by a label."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel. `gpu`: has data only where there are GPUs; all others have some in every healthy run."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat", "table", "state-timeline", "heatmap"] = "timeseries"
    stack: bool = False
    gpu: bool = False


@dataclass(frozen=True)
class Row:
    """A heading and its panels."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """One dashboard; its file is `<name>.json`."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """What Grafana reads."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in dashboard.rows:
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}
        )
        top += 1
        for index, panel in enumerate(row.panels):
            across, down = index % (COLUMNS // WIDTH), index // (COLUMNS // WIDTH)
            place = {"h": HEIGHT, "w": WIDTH, "x": across * WIDTH, "y": top + down * HEIGHT}
            panels.append({"id": len(panels) + 1, **_panel(panel), "gridPos": place})
        top += HEIGHT * -(-len(row.panels) // (COLUMNS // WIDTH))
    return {
        "id": None,
        "uid": f"segue-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["segue"],
        "editable": False,
        "schemaVersion": SCHEMA,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource(), _runs()]},
        "links": [
            {"type": "dashboards", "tags": ["segue"], "title": "Segue", "asDropdown": True, "keepTime": True, "includeVars": True}
        ],
        "annotations": {"list": []},
        "panels": panels,
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}


def _runs() -> dict[str, Any]:
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": _SOURCE,
        "query": "label_values(segue_build_info, run)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 2,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    instant = panel.kind in ("stat", "table")
    targets = [
        {
            "refId": chr(ord("A") + index),
            "expr": query.expr,
            "legendFormat": query.legend,
            "datasource": _SOURCE,
            "instant": instant,
            "range": not instant,
            **({"format": "table"} if panel.kind == "table" else {"format": "heatmap"} if panel.kind == "heatmap" else {}),
        }
        for index, query in enumerate(panel.queries)
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description + " Needs GPUs." * panel.gpu,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS.get(panel.kind, {}),
        "targets": targets,
    }


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
    "state-timeline": {"mergeValues": True, "showValue": "never", "legend": {"displayMode": "list", "placement": "bottom"}},
    "heatmap": {"calculate": False, "yAxis": {"unit": "none"}},
}


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": UNITS[panel.unit]}
    if panel.unit == "ratio":
        defaults |= {"min": 0, "max": 1}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stack else "none", "group": "A"}
        defaults["custom"] = {"fillOpacity": 30 if panel.stack else 0, "stacking": stacking, "showPoints": "never"}
    return defaults
