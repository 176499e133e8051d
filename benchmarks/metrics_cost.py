"""What measuring costs: CPU seconds that a run's processes spend on metrics, over all of their CPU seconds.

    python -m benchmarks.metrics_cost configs/smoke.toml --steps 40 --json cost.json

Counted, not timed against a run without metrics, which the noise between two runs would hide. Each process counts the values
it writes and the changes of its state clock (`segue_metric_writes_total`), and the CPU seconds of answering a scrape, by the
answering thread's own clock (`segue_scrape_cpu_seconds_total`). Writes are multiplied by what the dearest kind of write costs on
this machine, measured in CPU seconds; the cost of a scrape by how many Prometheus would make. What the driver asks of each
process at every step is measured here, by role, and multiplied by the steps. Not in it: the server's accepting of a connection.

Exit code 1: the run failed, or the share is not below the limit, a hundredth.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.command import Parser, ended, json_file
from benchmarks.watched import scratch, train
from segue import wire
from segue.cluster.roles import Facts
from segue.config import load_config
from segue.errors import RunFailed, UserError
from segue.metrics import ActivityClock, Metrics, StateClock
from segue.metrics.samples import Scrape, grown, role_of
from segue.metrics.vocabulary import ROLLOUT_PRECEDENCE, STATES
from segue.report.counted import NAMES

ROLES = ("scheduler", "rollout", "envpool", "learner")
INTERVAL_SECONDS = 5.0
"""Between two scrapes, as in monitoring/prometheus/prometheus.yml."""
CONFIG = Path(__file__).resolve().parent.parent / "configs" / "smoke.toml"
LIMIT = 0.01


def write_seconds(count: int = 20_000, rounds: int = 5) -> float:
    """CPU seconds of one write: of the dearest kind, in the best of `rounds` rounds (whatever else runs only adds)."""
    metrics = Metrics("learner", envs=("e",))
    clock, nodes = StateClock(STATES["learner"], time.monotonic), ActivityClock(ROLLOUT_PRECEDENCE, time.monotonic)

    def enter() -> None:
        with clock.in_state("compute"):
            pass

    def do() -> None:
        with nodes.doing("generate"):
            pass

    kinds: list[tuple[Callable[[], None], int]] = [
        (lambda: metrics.add("segue_rpc_failures_total", reason="lost"), 1),
        (lambda: metrics.set("segue_reward_mean", 0.5, env="e"), 1),
        (lambda: metrics.observe("segue_learner_step_seconds", 0.3, phase="optimizer"), 1),
        (metrics.counter("segue_learner_steps_total").add, 1),
        (enter, 2),
        (do, 2),
    ]
    return max(min(_per_call(kind, count) for _ in range(rounds)) / writes for kind, writes in kinds)


def asked_seconds(role: str, count: int = 200, rounds: int = 5) -> float:
    """CPU seconds of what a process answers the driver at every step."""
    metrics = Metrics(role, envs=("e",))

    def answer() -> None:
        wire.encode(Facts({f"{role}-0": metrics.snapshot(NAMES)}, {f"{role}-0": dict.fromkeys(STATES[role], 1.0)}, 1))

    return min(_per_call(answer, count) for _ in range(rounds))


def _per_call(write: Callable[[], None], count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        write()
    return (time.process_time() - began) / count


def share(
    before: Scrape, after: Scrape, seconds: float, per_write: float, scrapes: int, asked: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """By role, between two scrapes `seconds` apart, with `scrapes` scrapes of each target between the two moments, one per step.

    `writes` and `cpu_seconds` of its processes; `write_share`, `scrape_share` and `step_share` of the latter, `share` their sum.
    `asked`: CPU seconds of one target's answer at a step, by its role. A process's weight sync, which serves a target of its own,
    is in the share of its host.
    """
    found = {}
    for role in ROLES:
        hosted = {target: samples for target, samples in after.items() if _host(target) == role}
        then = {target: samples for target, samples in before.items() if target in hosted}
        writes, spent = (
            sum(samples[name] - then[target].get(name, 0.0) for target, samples in hosted.items())
            for name in ("segue_metric_writes_total", "segue_scrape_cpu_seconds_total")
        )
        cpu = grown(before, after, role, "segue_process_cpu_seconds_total")
        per_second = spent / scrapes / INTERVAL_SECONDS
        answers = scrapes * sum(asked[role_of(target)] for target in hosted)
        parts = {
            "write_share": writes * per_write / cpu,
            "scrape_share": per_second * seconds / cpu,
            "step_share": answers / cpu,
        }
        found[role] = {"writes": writes, "cpu_seconds": cpu, **parts, "share": sum(parts.values())}
    return found


def _host(target: str) -> str:
    """The role whose process serves a target: `weightsync-rollout-0` is of a rollout node."""
    return target.removeprefix("weightsync-").partition("-")[0]


def measure(config: Path, steps: int, deadline: float) -> dict[str, Any]:
    """The shares on one run of `steps` steps, from its fifth to the last but one."""
    first, last = 5, steps - 1
    moments: dict[int, float] = {}

    def heard(pid: int, line: str) -> None:
        if line.startswith("step"):
            moments[int(line.split()[1].partition("/")[0])] = time.monotonic()

    with scratch("metrics-cost") as folder:
        overrides = [f"steps={steps}", "eval.tasks=0"]
        watched = train(config, folder / "run", overrides, range(first, last + 1), deadline, heard=heard)
    per_write = write_seconds()
    before, after = watched.scrapes[first], watched.scrapes[last]
    asked = {role: asked_seconds(role) for role in STATES}
    roles = share(before, after, moments[last] - moments[first], per_write, last - first, asked)
    figures = {"roles": roles, "write_seconds": per_write, "answer_seconds": asked, "seconds": moments[last] - moments[first]}
    return figures | {"share": overall(roles)}


def overall(roles: dict[str, dict[str, float]]) -> float:
    """The share of all processes together: what they spend on metrics over what they spend."""
    cpu = sum(figures["cpu_seconds"] for figures in roles.values())
    return sum(figures["share"] * figures["cpu_seconds"] for figures in roles.values()) / cpu


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("metrics-cost", __doc__)
    parser.add_argument("config", type=Path, nargs="?", default=CONFIG, help="default: configs/smoke.toml")
    parser.add_argument("--steps", type=int, default=40, help="learner steps, at least 10 (default 40)")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds that the run may take (default 600)")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="write the result there")
    args = parser.parse_args(arguments)
    if args.steps < 10:
        parser.error("--steps must be 10 or more")
    machine = result.machine()
    try:
        seed = load_config(args.config).seed
        figures = measure(args.config, args.steps, args.deadline)
    except (UserError, RunFailed) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    for role, of in figures["roles"].items():
        parts = f"writes {of['write_share']:.3%}  scrapes {of['scrape_share']:.3%}  at steps {of['step_share']:.3%}"
        print(f"{role:10} {of['writes']:9.0f} writes {of['cpu_seconds']:8.2f} CPU s  {parts}")
    micros = 1e6 * figures["write_seconds"]
    print(f"all: {figures['share']:.3%} of the CPU seconds (limit {LIMIT:.0%}); a write takes {micros:.2f} µs")
    figures["holds"] = figures["share"] < LIMIT
    result.write(args.json, result.document("metrics_cost", figures, seeds=[seed], arguments=vars(args), where=machine))
    return 0 if figures["holds"] else 1


if __name__ == "__main__":
    sys.exit(ended(main))
