"""Plays a scenario and says what it reached, with its two ceilings: what generation alone and what training alone could do.

The ceiling of generation is the same world with a sink for a learner: it takes every batch at once and publishes nothing, and no
age bound and no last step holds admission back, so that every episode loop is busy; counted are sampled tokens per second once
the loops were filled, and there it ends. The ceiling of training is the learner fed from the recorded batches of the run: its
steps, the gathering of weights and its checkpoints, back to back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.figures import Efficiency, Figures, Window, figures_of, open_until
from benchmarks.virtual.learner import Work
from benchmarks.virtual.scenario import World
from benchmarks.virtual.world import Ran, Wrap, play
from segue.config.root import resolve
from segue.metrics.samples import grown

_FILLS = 2
"""How many times the loops are filled anew inside the window of the generation ceiling."""


def measure(
    world: World, *, ceilings: bool = True, window: Window | None = None, wrap: Wrap | None = None
) -> tuple[Figures, Ran]:
    """Play a scenario; `wrap` as in `play`. Raises `UserError` when it has too few steps for a steady state, `RunFailed` when the
    run fails."""
    config = world.config
    window = window or Window.of(config.steps, config.staleness.max_age)
    ran = play(world, (window.warm, window.last), wrap=wrap)
    unit = world.scenario.unit
    figures = figures_of(
        ran.lines,
        ran.scrapes[window.warm],
        ran.scrapes[window.last],
        window,
        config.staleness.max_age,
        sampled=sum(counts["decode_tokens"] for counts in ran.nodes.values()),
        unit=unit,
    )
    if not ceilings:
        return figures, ran
    works = ran.works[window.warm : window.last]
    efficiency = Efficiency(generation_ceiling(world), training_ceiling(world, works), figures.tokens_per_second)
    return msgspec.structs.replace(figures, efficiency=efficiency), ran


def training_ceiling(world: World, works: Sequence[Work]) -> float:
    """Trained tokens per second of the learner alone, on these batches; it saves checkpoints as the config says."""
    model, unit, every = world.scenario.learner, world.scenario.unit, world.config.checkpoint.every
    saving = model.checkpoint_seconds / every if every else 0.0
    fixed = model.step_seconds + model.gather_seconds + saving
    seconds = sum(fixed + model.seconds_per_token * unit * work.tokens for work in works)
    trained = unit * sum(work.stats["tokens_trained"] for work in works)
    return trained / seconds if seconds else math.inf


def generation_ceiling(world: World) -> float:
    """Sampled tokens per second of nodes and env pools with a sink behind them, every loop busy to the end of the window."""
    config = world.config
    places = config.rollout.nodes * config.rollout.max_episodes
    fill = -(-places // (config.batch.groups * config.group.size))
    window = Window(fill + 1, fill + 1 + max(2, _FILLS * fill))
    steps = open_until(window.last, places, config.batch.groups)
    data: dict[str, Any] = config.model_dump(exclude_none=True)
    data["mode"], data["steps"] = "async", steps
    data["staleness"]["max_age"], data["queue"]["groups"], data["data"]["prefetch"] = steps, 0, 1
    data["update"]["inflight"], data["group"]["redundancy"] = "recompute", 0
    alone = msgspec.structs.replace(world, config=resolve(data, "the ceiling of generation"))
    ran = play(alone, (window.warm, window.last), sink=True, until=window.last)
    seconds = ran.lines[window.last - 1]["elapsed_seconds"] - ran.lines[window.warm - 1]["elapsed_seconds"]
    sampled = grown(ran.scrapes[window.warm], ran.scrapes[window.last], "rollout", "segue_decode_tokens_total")
    return world.scenario.unit * sampled / seconds if seconds > 0.0 else math.inf
