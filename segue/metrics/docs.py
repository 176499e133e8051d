"""docs/metrics.md: the catalogue as a page. `python -m segue.metrics.docs [--check]`."""

from __future__ import annotations

import sys

from segue.docgen import DOCS, table, write_or_check
from segue.metrics import vocabulary as words
from segue.metrics.catalogue import CATALOGUE
from segue.metrics.metric import Label, Metric

_INTRO = """\
# Metrics

Generated from `segue/metrics/catalogue.py` by `python -m segue.metrics.docs`; do not edit.

Every role process serves `/metrics` and `/health` on a port of `cluster.ports`; `RUN/metrics/targets/*.json` says where, in the
format of Prometheus' `file_sd_configs`. Weight sync has no process of its own: its host serves its figures under the target
`weightsync-<host role>-<rank>`. Target labels are `run`, `role`, `rank` and `node`. `/health` answers 503 when the last sign of
life is too old.

Counters end in `_total`; units are in the names; `_timestamp_seconds` are moments. Every declared label combination exists as 0
from the start. States named `wait_…` are idle, all others are work. Quantiles of histograms interpolate between bucket edges:
read a p99 of 1.97 versions as 2.
"""


def document() -> str:
    """The whole page."""
    parts = [_INTRO, "## Catalogue\n"]
    parts.append(table(("Metric", "Type", "Labels", "Unit", "Exported by", "Meaning"), [_row(m) for m in CATALOGUE.values()]))
    parts.append("## States\n")
    meanings = [(role, f"`{state}`", text) for role, states in words.STATE_MEANINGS.items() for state, text in states.items()]
    parts.append(table(("Role", "State", "The process …"), meanings))
    parts.append(
        f"Every role has `{words.OTHER}` besides, for what is none of these. An env pool's seconds are summed over its "
        "slots (workers × instances), those of the other roles over their processes.\n"
    )
    order = ", ".join(f"`{state}`" for state in words.ROLLOUT_PRECEDENCE)
    parts.append(f"A rollout node runs many episodes at once; its state is the first of {order} that any of them is in.\n")
    parts.append("## Label values\n")
    parts.append(table(("Metric", "Label", "Role", "Values"), [row for m in CATALOGUE.values() for row in _values(m)]))
    parts.append("## Bucket edges\n")
    histograms = [m for m in CATALOGUE.values() if m.kind == "histogram"]
    parts.append(table(("Metric", "Edges"), [(f"`{m.name}`", _edges(m)) for m in histograms]))
    return "\n".join(parts)


def _row(metric: Metric) -> tuple[str, ...]:
    roles = "all" if metric.roles == words.ROLES else ", ".join(metric.roles)
    labels = ", ".join(f"`{name}`" for name in metric.label_names) or "–"
    return f"`{metric.name}`", metric.kind, labels, metric.unit or "–", roles, metric.help


def _values(metric: Metric) -> list[tuple[str, ...]]:
    """One row per label, or per role where they differ; states have a table of their own."""
    rows: list[tuple[str, ...]] = []
    for label in metric.labels:
        if label.values is words.STATES:
            continue
        by_role = [(role, _closed(label, role)) for role in metric.roles]
        if len({values for _, values in by_role}) == 1:
            by_role = [("", by_role[0][1])]
        rows += [(f"`{metric.name}`", f"`{label.name}`", role or "–", values) for role, values in by_role]
    return rows


def _closed(label: Label, role: str) -> str:
    values = label.values_for(role)
    return "given at start" if values is None else ", ".join(f"`{value}`" for value in values)


def _edges(metric: Metric) -> str:
    edges = ", ".join(f"{edge:g}" for edge in metric.buckets)
    return f"{edges}, `staleness.max_age` and 0.8 of it" if metric.unit == "versions" else edges


if __name__ == "__main__":
    sys.exit(write_or_check(DOCS / "metrics.md", document(), "segue.metrics.docs", sys.argv[1:]))
