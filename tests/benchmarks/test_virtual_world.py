"""Virtual time runs the production code: the same classes, promises and counts as a real run, and the same figures every time."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from virtual_world import small

import benchmarks.virtual
from benchmarks.virtual import engine, learner, weights, workers
from benchmarks.virtual.measure import measure
from benchmarks.virtual.scenario import WeightsModel
from benchmarks.virtual.world import Ran, VirtualCluster, play
from envpool.instances import Instances
from envpool.pool import Pool
from envpool.shell import PoolShell
from rollout.chat import ChatRenderer
from rollout.ledger import Ledger
from rollout.loop import EpisodeLoop
from rollout.node import NodeShell
from rollout.outbox import ExchangeLoop, Outbox
from rollout.update import Updater
from scheduler.core import SchedulerCore
from scheduler.queue import TrajectoryQueue
from scheduler.shell import SchedulerShell
from segue.clock import Deadlock, LogicalLoop
from segue.errors import RunFailed, UserError
from segue.metrics.vocabulary import PREFILL_CAUSES
from segue.ports.transfer import Transfer, TransferResult

pytestmark = pytest.mark.processes  # whole runs, if in one process

MODES: dict[str, dict[str, Any]] = {
    "recompute": {"mode": "async"},
    "keep": {"mode": "async", "update": {"inflight": "keep"}},
    "turn": {"mode": "async", "update": {"inflight": "turn", "drain_seconds": 20.0}},
    "episode": {"mode": "async", "update": {"inflight": "episode", "drain_seconds": 30.0}},
    "one_step_off": {"mode": "one_step_off", "update": {"drain_seconds": 30.0}},
    "sync": {"mode": "sync"},
    "rolling": {"mode": "async", "update": {"rolling": 0.4}},
    "slices": {"mode": "async", "rollout": {"slice_tokens": 60, "max_episodes": 3}},
}


def check_counts(ran: Ran, max_age: int) -> None:
    """Promises 2 and 4 on a world that has come to rest."""
    for status in (ran.status, ran.stopped):
        episodes = status["episodes"]
        assert episodes["admitted"] == sum(episodes["states"].values()) > 0
    states = ran.stopped["episodes"]["states"]
    assert sum(states[state] for state in ("pending", "leased", "parked", "assembling")) == 0
    for name, counts in ran.nodes.items():
        assert sum(counts[f"prefill_{cause}"] for cause in PREFILL_CAUSES) == counts["prefill_tokens"], name
        assert counts["running"] == counts["waiting"] == counts["episodes"] == 0, name
    sampled = sum(counts["decode_tokens"] for counts in ran.nodes.values())
    trained = sum(sum(line["ages"]) for line in ran.lines)
    in_batches = sum(line["tokens_generated"] for line in ran.lines)
    assert 0 < trained <= in_batches <= sampled
    assert trained == sum(line["tokens_trained"] for line in ran.lines)
    assert all(line["tokens_trained"] + line["tokens_masked_age"] == line["tokens_generated"] for line in ran.lines)
    assert max(len(line["ages"]) - 1 for line in ran.lines) <= max_age


def count_made(kind: type, made: Counter[type], monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the objects made of a class. That nothing here is a subclass of it, the next test shows."""
    real: Any = vars(kind)["__init__"]

    def begin(self: Any, *arguments: Any, **more: Any) -> None:
        made[kind] += 1
        real(self, *arguments, **more)

    monkeypatch.setattr(kind, "__init__", begin)


def test_every_part_but_those_at_the_ports_is_the_production_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = small()
    made: Counter[type] = Counter()
    for kind in (EpisodeLoop, Outbox, ExchangeLoop, Pool):
        count_made(kind, made, monkeypatch)

    async def look() -> VirtualCluster:
        cluster = VirtualCluster(world, tmp_path, set())
        await cluster.play()
        return cluster

    with asyncio.Runner(loop_factory=LogicalLoop) as runner:
        cluster = runner.run(look())
    roles = cluster.roles
    scheduler, node, pool = roles["scheduler-0"], roles["rollout-0"], roles["envpool-0"]
    assert type(scheduler) is SchedulerShell and type(scheduler.core) is SchedulerCore
    assert type(scheduler.queue) is TrajectoryQueue
    assert type(node) is NodeShell and type(node._updater) is Updater and type(node._ledger) is Ledger
    assert type(node._host.renderer) is ChatRenderer
    assert type(pool) is PoolShell
    modelled = {name: type(role).__module__ for name, role in roles.items() if type(role).__module__.startswith("benchmarks")}
    assert set(modelled) == {"learner-0"}
    admitted = cluster.ran.stopped["episodes"]["admitted"]
    assert made[EpisodeLoop] >= admitted > 0 and made[Pool] == 1 and made[Outbox] == made[ExchangeLoop] == 3, made


def test_nothing_of_the_roles_is_copied_or_subclassed() -> None:
    scheduler = (SchedulerShell, SchedulerCore, TrajectoryQueue)
    production: tuple[type, ...] = (
        *scheduler,
        NodeShell,
        EpisodeLoop,
        Outbox,
        ExchangeLoop,
        Updater,
        Ledger,
        PoolShell,
        Pool,
        Instances,
    )
    folder = Path(benchmarks.virtual.__file__).parent
    for path in folder.glob("*.py"):
        name = f"benchmarks.virtual.{path.stem}" if path.stem != "__init__" else "benchmarks.virtual"
        if path.stem == "__main__":
            continue
        module = sys.modules.get(name) or __import__(name, fromlist=["_"])
        for _, found in inspect.getmembers(module, inspect.isclass):
            if found.__module__ == name:
                assert not any(issubclass(found, kind) for kind in production), found
        for imported in vars(module).values():  # what a module uses of a role is the role's own object
            home = getattr(imported, "__module__", "")
            if isinstance(home, str) and home.split(".")[0] in ("scheduler", "rollout", "envpool"):
                assert getattr(sys.modules[home], imported.__name__) is imported
    ports = (engine.ModelledEngine, workers.ModelledWorkers, learner.ModelledLearner, weights.ModelledReceiver)
    assert all(kind.__bases__ == (object,) for kind in ports)


def bodies(folder: Path) -> dict[str, str]:
    """Every function of a folder's modules that is longer than a few lines: its code, and where it is."""
    found: dict[str, str] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                code = "\n".join(ast.dump(statement) for statement in node.body)
                if sum(isinstance(part, ast.stmt) for part in ast.walk(node)) > 6:
                    found[code] = f"{path}:{node.lineno}"
    return found


def test_no_function_of_the_roles_is_copied() -> None:
    root = Path(benchmarks.virtual.__file__).parents[2]
    production = {code: at for role in ("scheduler", "rollout", "envpool") for code, at in bodies(root / role).items()}
    assert len(production) > 200
    copies = {at: production[code] for code, at in bodies(root / "benchmarks").items() if code in production}
    assert not copies


def test_the_harness_itself_needs_no_torch() -> None:
    code = (
        "import sys, benchmarks.virtual.world, benchmarks.virtual.measure\n"
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("mode", MODES)
def test_counts_add_up_and_no_token_is_over_age(mode: str) -> None:
    world = small(config=MODES[mode])
    ran = play(world)
    assert len(ran.lines) == world.config.steps
    check_counts(ran, world.config.staleness.max_age)
    assert ran.warnings == []
    causes = {cause for counts in ran.nodes.values() for cause in PREFILL_CAUSES if counts[f"prefill_{cause}"]}
    assert {"first", "turn"} <= causes
    interrupted = ran.stopped["episodes"]["paused"]
    if mode == "recompute":
        assert interrupted > 0 and "weight_update" in causes
    if mode in ("keep", "sync"):
        assert interrupted == 0
    if mode == "keep":
        assert "weight_update" not in causes
        assert sum(line["trajectories_multi_version"] for line in ran.lines) > 0
    if mode == "sync":
        assert all(len(line["ages"]) == 1 for line in ran.lines)
        assert "weight_update" not in causes
    if mode == "slices":
        assert ran.stopped["totals"]["slices_extended"] > 0


def test_two_runs_of_one_seed_agree_to_the_last_bit_and_another_seed_does_not() -> None:
    first, second = play(small()), play(small())
    assert msgspec.json.encode(first) == msgspec.json.encode(second)
    assert msgspec.json.encode(play(small(config={"seed": 1})).lines) != msgspec.json.encode(first.lines)


PLAY = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import msgspec
from virtual_world import small
from benchmarks.virtual.world import play
ran = play(small(env={"error": 0.02, "crash": 0.002}, config={"update": {"rolling": 0.4}, "group": {"redundancy": 1}}))
print(hashlib.sha256(msgspec.json.encode(ran)).hexdigest())
"""


def test_processes_with_other_hash_seeds_agree_to_the_last_bit() -> None:
    """Nothing may depend on the order of a set of names, which differs from process to process."""
    found = {
        subprocess.run(
            [sys.executable, "-c", PLAY, str(Path(__file__).parent)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(benchmarks.virtual.__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


@pytest.mark.full
def test_ten_times_the_steps_leave_no_more_behind(tmp_path: Path) -> None:
    def left(steps: int) -> dict[str, int]:
        async def work() -> VirtualCluster:
            cluster = VirtualCluster(small(config={"steps": steps, "checkpoint": {"every": 1}}), tmp_path / str(steps), set())
            await cluster.run()
            return cluster

        with asyncio.Runner(loop_factory=LogicalLoop) as runner:
            cluster = runner.run(work())
        core = cluster.roles["scheduler-0"].core  # type: ignore[attr-defined]
        engines = cluster.engines.values()
        return {
            "episodes": len(core.tables.episodes.live),
            "batches": len(core.batches.kept),
            "requests": sum(len(engine._known) + len(engine._turns) for engine in engines),
            "kv": sum(engine._kv.idle for engine in engines),
            "prompts": sum(len(engine._kv._prompts) for engine in engines),
        }

    assert set(left(30).values()) == set(left(3).values()) == {0}


def test_a_small_kv_cache_evicts_and_preempts_and_the_ledger_still_balances() -> None:
    tight = {"max_tokens": 600, "slots": 8, "nodes": 1}
    ran = play(small(engine={"kv_tokens": 620}, config={"rollout": tight, "learner": {"mask_outcomes": []}}))
    check_counts(ran, 2)
    counts = {key: sum(node[key] for node in ran.nodes.values()) for key in next(iter(ran.nodes.values()))}
    assert counts["evictions"] > 0 and counts["prefill_eviction"] > 0
    assert counts["preemptions"] > 0 and counts["prefill_preemption"] > 0


def test_failing_environments_cost_attempts_and_nothing_else() -> None:
    ran = play(small(env={"error": 0.02, "crash": 0.002, "hang": 0.002}))
    check_counts(ran, 2)
    assert sum(ran.stopped["counts"]["retries"].values()) > 0
    assert len(ran.lines) == 6


@pytest.mark.full
def test_lengths_in_units_of_several_tokens_reach_nearly_the_same() -> None:
    fine, _ = measure(small(config={"steps": 9}), ceilings=False)
    coarse, _ = measure(small(config={"steps": 9}, unit=4), ceilings=False)
    assert coarse.tokens_per_second == pytest.approx(fine.tokens_per_second, rel=0.25)
    assert coarse.step_seconds.mean == pytest.approx(fine.step_seconds.mean, rel=0.25)


@pytest.mark.full
def test_efficiency_is_below_its_ceilings_and_sync_far_below_async() -> None:
    quick = {"learner": {"step_seconds": 10.0}}
    asynchronous, _ = measure(small(config={"steps": 9}, **quick))
    synchronous, _ = measure(small(config={"steps": 9, "mode": "sync"}, **quick))
    assert asynchronous.efficiency is not None and synchronous.efficiency is not None
    assert 0.3 < asynchronous.efficiency.value <= 1.02
    assert synchronous.efficiency.value < asynchronous.efficiency.value
    assert synchronous.staleness.max == 0 and (asynchronous.staleness.max or 0) <= 2
    assert synchronous.idle_share["rollout"] > asynchronous.idle_share["rollout"]
    assert asynchronous.reprefill_share is not None and asynchronous.reprefill_share > 0.0


def test_a_world_that_cannot_go_on_ends_with_a_sentence() -> None:
    with pytest.raises((RunFailed, UserError), match=r"modelled|batch"):
        play(small(env={"hang": 1.0}))


def test_a_wait_for_nothing_is_a_deadlock() -> None:
    """What a transfer's sender waits for without its members: its deadline ends it; without one the loop would say so."""

    async def alone() -> TransferResult:
        hub = weights.Hub(WeightsModel(), 0)
        return await hub.send(Transfer(1, 0, 1, 1, ["rollout-0"], "modelled", 5.0))

    async def without_a_deadline() -> None:
        await weights.Hub(WeightsModel(), 0).meeting(1).came.wait()

    with asyncio.Runner(loop_factory=LogicalLoop) as runner:
        result = runner.run(alone())
        assert (result.ok, result.missing) == (False, ["rollout-0"])
    with asyncio.Runner(loop_factory=LogicalLoop) as runner, pytest.raises(Deadlock):
        runner.run(without_a_deadline())
