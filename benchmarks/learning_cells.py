"""The cells of the staleness ablation: which there are, how one is run so that every token trains at one age, what is kept.

One batch at a time, generated whole under the weights of step k − η: that follows from admission (docs/design.md §5) alone where
generating is fast against training. Under weights of step s groups may begin up to batch s + η; if all of them are finished
before step s + 1 is published, batch s + η is exactly what those weights made. Serial mode's logical clock makes it so: a learner
step takes longer than all the generation that may run beside it. The first η batches are younger, since nothing older exists.
Whether it was so is read from metrics.jsonl and not assumed (`check_ages`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.result import versions
from benchmarks.results_folder import flat
from benchmarks.watched import Watched, train
from segue.config import Config, load_config
from segue.errors import RunFailed, UserError
from segue.files import write_json
from segue.report import steps as step_lines

AGES = (0, 1, 2, 4, 8, 16)
SYNC = "sync"
"""What stands in a cell of η = 0 for the correction: at age 0 all weights are 1, so that all corrections are the same."""
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none": ("learner.correction=none",),
    "decoupled": ("learner.correction=decoupled",),
    "tis": ("learner.correction=tis",),
    "loglinear": ("learner.correction=decoupled", "learner.proximal=loglinear"),
    "mask": ("learner.correction=mask",),
}
"""Names as in docs/algorithms.md, and the settings of each."""
PACKAGES = ("torch", "transformers")
"""Whose versions decide what a cell learns."""
PRESETS = {"full": ("1,2,4,8,16:all",), "thin": ("4:all", "8:none,decoupled", "16:none,decoupled")}
CURVES = ("reward_mean", "reward_std", "entropy", "clip_fraction", "kept_fraction", "ess_token", "kl_k3", "grad_norm")
"""Statistics of metrics.jsonl that are kept step by step."""
DECODE_SECONDS, LEARNER_SECONDS = 1e-4, 2.0
"""Logical: of a decoding step, and of a learner step per batch that may be generated beside it. A batch takes some hundred
decoding steps and, at worst, some exchanges with the scheduler and the env pool that wait for a flush timer."""
CELL_SECONDS = 4 * 3600.0
_ITEM = re.compile(r"(\d+(?:,\d+)*):(\w+(?:,\w+)*)")


class Cell(msgspec.Struct, frozen=True, order=True):
    """One run: `seed`, `age` η, and the name of the correction."""

    seed: int
    age: int
    correction: str

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"eta{self.age}-{self.correction}-seed{self.seed}"


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a cell came to: the share of `n` held-out tasks solved at the end, and at the start where that was measured."""

    seed: int
    age: int
    correction: str
    steps: int
    success: float
    n: int
    failed: int
    success_before: float | None
    curves: dict[str, list[float | None]]
    seconds: float

    @property
    def cell(self) -> Cell:
        return Cell(self.seed, self.age, self.correction)


# --- the grid ---------------------------------------------------------------------------------------------------------------


def read_grid(items: Sequence[str]) -> list[tuple[int, str]]:
    """(η, correction) for `AGES:CORRECTIONS` items such as "4,8:none,decoupled" or "16:all", or for a preset's name.

    Raises `UserError`. η = 0 is not among them: it belongs to every grid.
    """
    chosen: set[tuple[int, str]] = set()
    names = list(CORRECTIONS)
    for item in [part for name in items for part in PRESETS.get(name, (name,))]:
        found = _ITEM.fullmatch(item)
        if found is None:
            raise UserError(
                f"--grid {item} is neither AGES:CORRECTIONS, for instance 4,8:none,decoupled or 16:all, nor one of "
                f"{', '.join(PRESETS)}: correct it."
            )
        wanted = names if found[2] == "all" else found[2].split(",")
        unknown = sorted(set(wanted) - set(names))
        if unknown:
            raise UserError(f"--grid {item} names the correction {unknown[0]!r}: choose from {', '.join(names)}, or all.")
        ages = [int(age) for age in found[1].split(",")]
        if 0 in ages:
            raise UserError(f"--grid {item} names age 0, which runs once per seed in every grid: leave it out.")
        chosen |= {(age, correction) for age in ages for correction in wanted}
    return sorted(chosen, key=lambda pair: (pair[0], names.index(pair[1])))


def cells_of(grid: Sequence[tuple[int, str]], seeds: Sequence[int]) -> list[Cell]:
    """All cells, seed by seed, the synchronous one first: a budget that runs out leaves whole pairs behind."""
    return [Cell(seed, age, correction) for seed in seeds for age, correction in [(0, SYNC), *grid]]


# --- one cell ---------------------------------------------------------------------------------------------------------------


def base_overrides(config: Config, steps: int, lr: float, minibatches: int, eval_tasks: int) -> list[str]:
    """What all cells share beside the config: one node that holds a whole batch, and a training that is slow against it.

    Nothing is kept out of the loss by its outcome: a group that is dropped for that would be replaced by a younger one.
    """
    episodes = config.batch.groups * config.group.size
    return [
        "mode=async",
        f"steps={steps}",
        f"learner.lr={lr!r}",
        f"learner.minibatches={minibatches}",
        "learner.mask_outcomes=[]",
        "update.policy=every",
        "rollout.nodes=1",
        f"rollout.slots={episodes}",
        f"rollout.max_episodes={episodes}",
        "envpool.pools=1",
        "envpool.workers=1",
        f"envpool.instances={episodes}",
        "checkpoint.every=0",
        f"eval.tasks={eval_tasks}",
        "eval.after=true",
        f"serial.decode_seconds={DECODE_SECONDS!r}",
        f"serial.prefill_seconds_per_token={DECODE_SECONDS / 1000!r}",
        f"serial.transfer_seconds={DECODE_SECONDS!r}",
    ]


def cell_overrides(cell: Cell, config: Config) -> list[str]:
    """What makes this cell of the shared settings."""
    overrides = [f"seed={cell.seed}", f"staleness.max_age={cell.age}", f"eval.before={'true' if cell.age == 0 else 'false'}"]
    overrides.append(f"serial.learner_step_seconds={LEARNER_SECONDS * (cell.age + 1)!r}")
    overrides.append("data.prefetch=0")
    if config.warmstart is not None:
        overrides.append(f"warmstart.seed={cell.seed}")
    return [*overrides, *CORRECTIONS.get(cell.correction, ())]


def run_cell(config: Path, shared: Sequence[str], cell: Cell, run: Path) -> Outcome:
    """Train one cell in a process of its own. Raises `RunFailed`; also when some token had another age."""
    overrides = [*shared, *cell_overrides(cell, load_config(config, list(shared)))]
    return outcome_of(cell, train(config, run, overrides, (), CELL_SECONDS, serial=True))


def outcome_of(cell: Cell, watched: Watched) -> Outcome:
    """What is kept of a finished run. Raises `RunFailed` when some token had another age."""
    check_ages(watched.lines, cell)
    evaluated = watched.summary["eval"]
    after, before = evaluated["after"], evaluated.get("before")
    return Outcome(
        seed=cell.seed,
        age=cell.age,
        correction=cell.correction,
        steps=len(watched.lines),
        success=after["success"],
        n=after["n"],
        failed=after["failed"],
        success_before=before["success"] if before else None,
        curves={name: [step_lines.number(line, name) for line in watched.lines] for name in CURVES},
        seconds=float(watched.summary["wall_seconds"]),
    )


def check_ages(lines: Sequence[Mapping[str, Any]], cell: Cell) -> None:
    """Every token trained at age η exactly from batch η on, and at the age of the oldest weights before. Raises `RunFailed`."""
    for line in lines:
        age = min(int(line["step"]), cell.age)
        found = [a for a, tokens in enumerate(line["ages"]) if tokens]
        if found != [age]:
            raise RunFailed(
                "learning",
                f"Cell {cell.name} trained tokens of the ages {found or 'none'} in step {line['step']}, where all should be "
                f"{age}: its figures are not those of an exact age, and are thrown away.",
            )


# --- the results folder -----------------------------------------------------------------------------------------------------


def settings_of(config: Config) -> dict[str, Any]:
    """Everything that all cells of a folder must share, flat: "learner.lr" and so on, and the versions that made them, the commit
    too: figures of another loss are no pair. What a cell sets for itself is left out."""
    settings = flat({**config.model_dump(mode="json"), "versions": versions(PACKAGES)})
    own = ("seed", "warmstart.seed", "eval.before", "staleness.max_age", "serial.learner_step_seconds", "data.prefetch")
    derived = ("queue.groups", "learner.correction", "learner.proximal")
    return {key: value for key, value in settings.items() if key not in own + derived}


def check_settings(known: Mapping[str, Any], settings: Mapping[str, Any], folder: Path) -> None:
    """Cells of two settings are no pairs. Raises `UserError` with the first difference."""
    for key in sorted({*known, *settings}):
        if known.get(key) != settings.get(key):
            raise UserError(
                f"{folder} holds cells with {key} = {known.get(key)!r}, and now it is {settings.get(key)!r}: go on with the old "
                "value, or name another folder with --results."
            )


def cell_file(folder: Path, cell: Cell) -> Path:
    """Where a cell's outcome lies; it is there exactly if the cell is done."""
    return folder / "cells" / f"{cell.name}.json"


def save(folder: Path, outcome: Outcome) -> None:
    """Write it aside and rename it."""
    write_json(cell_file(folder, outcome.cell), msgspec.to_builtins(outcome))


def load(folder: Path, cell: Cell) -> Outcome | None:
    """What a cell came to; None if it was not run yet. Raises `UserError` for a damaged file."""
    path = cell_file(folder, cell)
    try:
        outcome = msgspec.json.decode(path.read_bytes(), type=Outcome)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): remove it, and its cell runs again.") from None
    if outcome.cell != cell:
        raise UserError(f"{path} holds the cell {outcome.cell.name}: remove it, and its cell runs again.")
    return outcome
