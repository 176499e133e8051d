"""The two ceilings of a real run: what generation alone, and what training alone, reach on these cores with this config.

Both are whole runs of `segue train`: all processes on Ray, scheduler and env pools at work, pinned as in any arm. Only one side
is another (`benchmarks.recorded`).

generation alone  The learner is a sink: it takes every batch at once, computes and publishes nothing. No age bound and no last
                  step holds admission back, so that every episode loop is busy. Counted are sampled tokens per second between
                  two scrapes, after the loops were filled; then, or once it has recorded as many batches as an arm trains,
                  the run is stopped.
training alone    Nodes repeat those turns at next to no cost, and environments answer at once. The learner does all that it
                  does in an arm: gathering, training, checkpoints as configured, publishing, sending. Trained tokens per second
                  in the window of an asynchronous run. `training_wait_share` says how much of it the learner waited for a batch:
                  where that is not near 0, the ceiling is not its own. `unknown_share` of its turns had not been recorded, and
                  were any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.async_vs_sync import rate, turn_seconds
from benchmarks.figures import ROLES, Window, open_until, state_shares
from benchmarks.recorded import unknown_share
from benchmarks.watched import Watched, train
from segue.config import Config, load_config
from segue.errors import RunFailed
from segue.metrics.samples import grown
from segue.metrics.vocabulary import STATES, is_idle
from segue.suite_path import look_in

RUN_SECONDS = 4 * 3600.0
"""As an arm's (`benchmarks.sweep_real`)."""
_FILLS = 2
"""How many times the loops are filled anew inside the window of generation alone, at least."""
_AT_ONCE = ("task.args.mean=0.0", "task.args.reset_seconds=0.0", "task.args.slow_reset=0.0")
"""Of the suite `latency`: environments that answer at once."""
_ASYNC = ('mode="async"', 'update.inflight="recompute"', 'update.policy="every"', "group.redundancy=0", "eval.tasks=0")


class Ceilings(msgspec.Struct, frozen=True):
    """Tokens per second of each side alone, the mean seconds of sampling an action, and what each waited for.

    generation_idle_share   of the time of generation alone, that nodes waited for environments, episodes or weights
    training_wait_share     of the time of training alone, that the learner waited for batches
    repeating_share         of the time of training alone, that a node's episodes had a request in its engine
    unknown_share           of the turns of training alone, those that were not recorded
    """

    generation: float
    training: float
    turn_generate_seconds: float
    generation_idle_share: float
    training_wait_share: float
    repeating_share: float
    unknown_share: float


def measure(source: Path, overrides: Sequence[str], folder: Path) -> Ceilings:
    """Run both, one after the other; `overrides` are those of a point and a seed, `folder` is for the runs and the recording."""
    look_in(Path(__file__).resolve().parent.parent)
    config = load_config(source, list(overrides))
    window = generation_window(config)
    turns = folder / "turns"
    asked = generation_alone(overrides, window, config, turns)
    enough = max(window.last, config.steps)  # turns for all of training alone
    alone = train(source, folder / "generation", asked, _marks(window), RUN_SECONDS, until=enough)
    fed = training_alone(overrides, turns)
    after = load_config(source, fed)
    trained = Window.of(after.steps, after.staleness.max_age)
    busy = train(source, folder / "training", fed, _marks(trained), RUN_SECONDS)
    return Ceilings(
        generation=sampled_rate(alone, window),
        training=rate(busy.lines, trained.warm, trained.last),
        turn_generate_seconds=turn_seconds(alone.scrapes[window.warm], alone.scrapes[window.last])[0],
        generation_idle_share=sum(share for state, share in _shares(alone, window, "rollout").items() if is_idle(state)),
        training_wait_share=_shares(busy, trained, "learner")["wait_batch"],
        repeating_share=_shares(busy, trained, "rollout")["generate"],
        unknown_share=unknown_share(turns),
    )


def generation_seconds(source: Path, overrides: Sequence[str], folder: Path) -> float:
    """Mean seconds that sampling an action takes while all slots decode and none is waited for: generation alone, with as many
    episodes as slots and environments that answer at once."""
    look_in(Path(__file__).resolve().parent.parent)
    slots = load_config(source, list(overrides)).rollout.slots
    full = [*overrides, *_AT_ONCE, f"rollout.max_episodes={slots}"]
    config = load_config(source, full)
    window = generation_window(config)
    asked = generation_alone(full, window, config, folder / "turns")
    watched = train(source, folder / "generation", asked, _marks(window), RUN_SECONDS, until=window.last)
    return turn_seconds(watched.scrapes[window.warm], watched.scrapes[window.last])[0]


def generation_window(config: Config) -> Window:
    """In steps of the sink: after the loops were filled, long enough for each to be filled anew, and as long as an arm's."""
    batch = config.batch.groups * config.group.size
    fill = -(-config.rollout.nodes * config.rollout.max_episodes // batch)
    arm = Window.of(config.steps, config.staleness.max_age)
    return Window(fill + 1, fill + 1 + max(arm.last - arm.warm, _FILLS * fill))


def generation_alone(overrides: Sequence[str], window: Window, config: Config, turns: Path) -> list[str]:
    """Overrides: the learner is a sink, and nothing holds admission back."""
    steps = open_until(max(window.last, config.steps), config.rollout.nodes * config.rollout.max_episodes, config.batch.groups)
    return [
        *overrides,
        *_ASYNC,
        f"steps={steps}",
        f"staleness.max_age={steps}",
        "queue.groups=0",
        "checkpoint.every=0",
        'learner.trainer="benchmarks.recorded:Sink"',
        'rollout.engine="benchmarks.recorded:record"',
        f"rollout.engine_args={{folder={str(turns)!r}}}",
    ]


def training_alone(overrides: Sequence[str], turns: Path) -> list[str]:
    """Overrides: nodes repeat what was recorded, environments answer at once."""
    engine = 'rollout.engine="benchmarks.recorded:replay"'
    return [*overrides, *_ASYNC, *_AT_ONCE, engine, f"rollout.engine_args={{folder={str(turns)!r}}}"]


def sampled_rate(watched: Watched, window: Window) -> float:
    """Sampled tokens per second of all nodes, by the nodes' own clocks. Raises `RunFailed` where nothing was sampled."""
    before, after = watched.scrapes[window.warm], watched.scrapes[window.last]
    nodes = sum(1 for target in after if target.startswith("rollout-"))
    seconds = sum(grown(before, after, "rollout", "segue_worker_state_seconds_total", state=state) for state in STATES["rollout"])
    sampled = grown(before, after, "rollout", "segue_decode_tokens_total")
    if not (seconds > 0.0 and sampled > 0.0):
        raise RunFailed("rollout", "Generation alone sampled nothing in its window: use longer runs (--steps).")
    return nodes * sampled / seconds


def _shares(watched: Watched, window: Window, role: str) -> dict[str, float]:
    assert role in ROLES
    return state_shares(watched.scrapes[window.warm], watched.scrapes[window.last], role)


def _marks(window: Window) -> set[int]:
    return {window.warm, window.last}
