"""PromQL for dashboards: the few forms that panels need, all restricted to the chosen runs and kept apart by run."""

from __future__ import annotations

RUNS = 'run=~"$run"'
WINDOW = "$__rate_interval"


def select(name: str, where: str = "") -> str:
    """The series of a metric or recording rule, of the chosen runs."""
    return f"{name}{{{RUNS}{', ' + where if where else ''}}}"


def over(aggregate: str, name: str, *by: str, where: str = "") -> str:
    """An aggregate (sum, max, …) over the series, by run and `by`."""
    return f"{aggregate} by ({', '.join(('run', *by))}) ({select(name, where)})"


def rate(name: str, *by: str, where: str = "") -> str:
    """What a counter grows by per second, summed by run and `by`."""
    return f"sum by ({', '.join(('run', *by))}) (rate({select(name, where)}[{WINDOW}]))"


def increase(name: str, *by: str, where: str = "") -> str:
    """What a counter has grown by in the window, summed by run and `by`."""
    return f"sum by ({', '.join(('run', *by))}) (increase({select(name, where)}[{WINDOW}]))"


def share(part: str, whole: str) -> str:
    """`part` of `whole`; nothing where the whole is 0."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, name: str, *by: str, where: str = "") -> str:
    """A quantile of what a histogram observed in the window, by run and `by`."""
    return f"histogram_quantile({q:g}, {rate(f'{name}_bucket', 'le', *by, where=where)})"


def mean(name: str, *by: str, where: str = "") -> str:
    """The mean of what a histogram observed in the window, by run and `by`."""
    return share(rate(f"{name}_sum", *by, where=where), rate(f"{name}_count", *by, where=where))
