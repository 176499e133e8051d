"""The rules of docs/design.md §2 about who may import what, checked on the source and, for what is heavy, by importing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from import_graph import PACKAGES, ROLES, Import, Module, cycle, edges, modules, reaches

GRAPH = modules()
HEAVY = ("torch", "transformers", "torchdata", "ray", "vllm", "safetensors", "tokenizers")

WITH_TORCH = (
    "segue.ports.weights",
    "segue.cluster",
    "rollout.embedded",
    "rollout.vllm",
    "rollout.fitting",
    "rollout.model_config",
    "learner",
    "weightsync",
)
"""Modules that may hold tensors, with all that is in them. Everything else is free of torch, also through others."""


def inside(name: str, *parents: str) -> bool:
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def room(name: str) -> str:
    return name.partition(".")[0]


def is_actor(module: Module) -> bool:
    """A role's thin Ray wrapper; the cluster wiring counts as one."""
    return module.path.name == "actor.py" or inside(module.name, "segue.cluster")


def found(names: Iterable[str], *roots: str) -> dict[str, list[str]]:
    """Which of these modules import a package of `roots`, and what of it."""
    return {name: wrong for name in names if (wrong := GRAPH[name].imports_any(*roots))}


@pytest.mark.parametrize("role", PACKAGES)
def test_a_role_imports_only_itself_and_segue(role: str) -> None:
    names = [name for name in GRAPH if room(name) == role and not inside(name, "segue.cluster")]
    assert found(names, *(other for other in ROLES if other != role), "benchmarks", "tests") == {}
    if role != "segue":
        above = ("segue.cluster", "segue.cli")
        assert [(name, i.name) for name in names for i in GRAPH[name].imports if inside(i.name, *above)] == []


def test_only_actors_and_the_cluster_wiring_import_ray() -> None:
    assert found((name for name, module in GRAPH.items() if not is_actor(module)), "ray") == {}


def test_only_the_command_line_reaches_into_the_cluster_and_only_when_it_runs() -> None:
    for module in GRAPH.values():
        if room(module.name) == "segue" and not inside(module.name, "segue.cluster"):
            reached = [i for i in module.imports if inside(i.name, "segue.cluster")]
            assert not reached or (module.name == "segue.cli" and not any(i.at_import for i in reached)), module.name


def torch_free() -> list[str]:
    return [name for name, module in GRAPH.items() if not inside(name, *WITH_TORCH) and not is_actor(module)]


def test_torch_stays_where_tensors_are() -> None:
    assert [chain for name in torch_free() if (chain := reaches(GRAPH, name, HEAVY))] == []


def test_state_machines_have_no_clock_no_loop_and_no_threads() -> None:
    """Time is handed in, I/O is the shell's: the same code runs in production, in a property test and in virtual time."""
    names = [name for name in GRAPH if inside(name, "scheduler.core", "scheduler.queue")]
    world = ("asyncio", "threading", "time", "datetime", "random", "socket", "concurrent", "multiprocessing")
    assert names and found(names, *world) == {}


def test_scheduler_and_episode_loops_start_no_threads() -> None:
    names = [name for name in torch_free() if room(name) in ("scheduler", "rollout")]
    assert names and found(names, "threading", "concurrent", "multiprocessing", "subprocess") == {}


def test_nothing_is_pickled_and_metrics_have_one_home() -> None:
    assert found(GRAPH, "pickle", "cloudpickle", "dill", "marshal", "shelve") == {}
    assert found((name for name in GRAPH if not inside(name, "segue.metrics")), "prometheus_client") == {}


def test_imports_go_round_in_no_circle() -> None:
    assert cycle(GRAPH) == []


def test_the_graph_is_whole() -> None:
    """The checks above would pass on an empty graph."""
    assert {room(name) for name in GRAPH} == set(PACKAGES)
    assert "segue.trajectory" in edges(GRAPH)["segue.episode"]
    assert "torch" in GRAPH["segue.ports.weights"].imports_any("torch")
    assert reaches(GRAPH, "segue.ports.weights", ("torch",)) == ["segue.ports.weights", "torch"]
    assert reaches(GRAPH, "learner.trainer", ("torch",))[-1].partition(".")[0] == "torch"
    lazy = {i.name: i.at_import for i in GRAPH["segue.cli"].imports}
    assert lazy["segue.report.read"] is False and lazy["segue.errors"] is True


def test_a_cycle_and_a_chain_would_be_found() -> None:
    here = Path(__file__)
    graph = {
        "a": Module("a", here, [Import("b", True)]),
        "b": Module("b", here, [Import("c", True), Import("torch.nn", False)]),
        "c": Module("c", here, [Import("torch", True)]),
    }
    assert cycle(graph) == []
    assert reaches(graph, "a", ("torch",)) == ["a", "b", "c", "torch"]
    graph["c"].imports.append(Import("a", True))
    assert cycle(graph) == ["a", "b", "c", "a"]


def test_importing_everything_that_is_light_imports_nothing_heavy() -> None:
    names = [name for name in torch_free() if not name.endswith(".__main__")]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stdout + result.stderr


def test_only_what_asks_past_proxies_asks_over_http() -> None:
    """`urllib.request.urlopen` goes through the proxy that the environment names, which need not reach a run's own hosts."""
    asking = {name for name, module in GRAPH.items() if any(found.name.startswith("urllib.request") for found in module.imports)}
    assert asking == {"segue.metrics.scrape"}
