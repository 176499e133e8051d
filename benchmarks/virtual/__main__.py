"""What a scenario reaches in virtual time, and how far that is from what generation or training alone could do.

python -m benchmarks.virtual SCENARIO [--set KEY=VALUE …] [--no-ceilings] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks import result
from benchmarks.command import Parser, ended, json_file
from benchmarks.figures import Figures
from benchmarks.virtual.measure import measure
from benchmarks.virtual.scenario import load_world, parse_sets
from benchmarks.virtual.world import Ran, quiet
from segue.errors import RunFailed, UserError

FOLDER = Path(__file__).resolve().parent.parent / "scenarios"


def scenario_file(text: str) -> Path:
    """A file's path, or the name of one of benchmarks/scenarios/, which is found from anywhere."""
    named = FOLDER / f"{text}.toml"
    return named if not Path(text).exists() and named.is_file() else Path(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("virtual", __doc__)
    parser.add_argument("scenario", type=scenario_file, help="a scenario file, or the name of one of benchmarks/scenarios/")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="over the file's")
    parser.add_argument("--no-ceilings", action="store_true", help="play the scenario alone, without its two ceilings")
    parser.add_argument("--json", type=json_file, help="write the figures here")
    return parser.parse_args(arguments)


def text(figures: Figures, ran: Ran, seconds: float) -> str:
    """The figures for reading."""
    idle = ", ".join(f"{role} {share:.0%}" for role, share in figures.idle_share.items())
    age, wasted, bias = figures.staleness, figures.wasted, figures.length_bias
    lines = [
        f"{ran.seconds:,.0f} virtual seconds in {seconds:.1f} s",
        f"{figures.tokens_per_second:,.0f} trained tokens/s over {figures.steps} steps of {figures.step_seconds.mean:.2f} s "
        f"(median {figures.step_seconds.median:.2f}, max {figures.step_seconds.max:.2f})",
        f"idle: {idle}",
        f"age: mean {age.mean or 0.0:.2f}, max {age.max or 0} of at most {age.bound}",
        f"re-prefill: {figures.reprefill_share or 0.0:.1%} of all prefill; sampled and never trained: {wasted.run_share:.1%}; "
        f"length bias {f'{bias:.3f}' if bias else '–'}",
    ]
    if (efficiency := figures.efficiency) is not None:
        lines.append(
            f"efficiency {efficiency.value:.3f} of min(generation alone {efficiency.generation_ceiling:,.0f}, "
            f"training alone {efficiency.training_ceiling:,.0f} tokens/s; ratio {efficiency.balance:.2f})"
        )
    return "\n".join(lines)


def main() -> int:
    args = parse()
    where = result.machine()
    quiet()
    try:
        world = load_world(args.scenario, parse_sets(args.overrides))
        began = time.perf_counter()
        figures, ran = measure(world, ceilings=not args.no_ceilings)
    except (RunFailed, UserError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    seconds = time.perf_counter() - began
    print(text(figures, ran, seconds))
    document = {"figures": msgspec.to_builtins(figures), "virtual_seconds": ran.seconds, "wall_seconds": seconds}
    told = result.document("virtual", document, seeds=[world.config.seed], arguments=vars(args), where=where)
    result.write(args.json, told)
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
