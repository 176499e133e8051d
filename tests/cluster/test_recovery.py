"""Roles that come up while the run goes on, with stand-ins for their processes: who learns of whom, and what is counted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from segue.cluster import recovery as recoveries
from segue.cluster.recovery import Reason, Recovery, worth_another
from segue.cluster.role_handle import Broken, Died
from segue.cluster.roles import RoleSpec
from segue.config import Config
from segue.config.root import resolve
from segue.errors import RunFailed
from segue.metrics.vocabulary import RESTART_REASONS
from segue.rundir import RunDir

SECONDS = 20.0


class Handle:
    """A role process. `connected`: those it was told of; a method in `holds` waits for its event, one in `fails` raises once."""

    def __init__(self, role: str, rank: int, start: int = 1, restarts: Mapping[str, int] | None = None) -> None:
        self.spec = RoleSpec(role, rank, 1, "run", "", "", start=start, restarts=dict(restarts or {}))
        self.name = self.spec.name
        self.fatal = role not in ("envpool", "rollout")
        self.handle = self
        self.connected: dict[str, Handle] = {}
        self.holds: dict[str, asyncio.Event] = {}
        self.fails: dict[str, RunFailed] = {}
        self.killed = False

    async def remote(self, method: str, *arguments: Any) -> None:
        if method in self.holds:
            await self.holds[method].wait()
        if method in self.fails:
            raise self.fails.pop(method)
        if method == "connect":
            name, other = arguments
            self.connected[name] = other
        if method == "run":
            await asyncio.Event().wait()

    def kill(self) -> None:
        self.killed = True


class Crew:
    """As `segue.cluster.crew.Crew`, without processes: `made` are those that were created, each after `prepare` has seen it."""

    def __init__(self, *handles: Handle) -> None:
        self.actors = {handle.name: handle for handle in handles}
        self.ends: dict[asyncio.Task[Any], Handle] = {}
        self.placement: Any = None
        self.made: list[Handle] = []
        self.said: list[str] = []
        self.prepare: Callable[[Handle], None] = lambda handle: None

    def of(self, *roles: str) -> list[Handle]:
        return [handle for handle in self.actors.values() if handle.spec.role in roles]

    def create(self, role: str, rank: int, start: int = 1, restarts: Mapping[str, int] | None = None) -> Handle:
        handle = Handle(role, rank, start, restarts)
        self.prepare(handle)
        self.made.append(handle)
        return handle

    async def find_pid(self, handle: Handle) -> None:
        await handle.remote("pid")

    def watch(self, handle: Handle) -> None:
        self.ends[asyncio.create_task(handle.remote("run"))] = handle

    def say(self, line: str) -> None:
        self.said.append(line)


class Placement:
    """One other host, which Ray believes in as long as `alive`; `newcomers` are told once."""

    def __init__(self, alive: bool = True, again: bool = True) -> None:
        self.alive, self.again = alive, again
        self.names: list[str] = []
        self.given_up: list[str] = []

    def give_up(self, name: str) -> None:
        self.given_up.append(name)

    def there(self, name: str) -> bool:
        return self.alive

    async def seat_again(self, name: str) -> bool:
        return self.again

    def describe(self, name: str) -> str:
        return "host 1 (node1)"

    def newcomers(self) -> list[str]:
        names, self.names = self.names, []
        return names


@pytest.fixture
def config() -> Config:
    cluster = {"restarts": 3, "start_seconds": 60.0}
    return resolve({"steps": 1, "task": {"env": "latency"}, "model": {"path": "x"}, "cluster": cluster}, "a test")


def recovery(config: Config, crew: Crew) -> Recovery:
    return Recovery(config, RunDir(Path("run")), crew)  # type: ignore[arg-type]


async def settle() -> None:
    """Until nobody can go on."""
    for _ in range(50):
        await asyncio.sleep(0)


async def done(recovery: Recovery) -> None:
    await asyncio.wait_for(asyncio.gather(*recovery.tasks), SECONDS)


GATES = [(rank, method) for rank in (0, 1) for method in ("build", "start")]


@pytest.mark.parametrize(
    "order",
    [
        order
        for order in itertools.permutations(GATES)
        if all(order.index((r, "build")) < order.index((r, "start")) for r in (0, 1))
    ],
)
async def test_two_restarts_that_overlap_find_each_other(config: Config, order: tuple[tuple[int, str], ...]) -> None:
    scheduler, *nodes = Handle("scheduler", 0), Handle("rollout", 0), Handle("rollout", 1)
    crew = Crew(scheduler, *nodes)
    events = {gate: asyncio.Event() for gate in GATES}

    def prepare(handle: Handle) -> None:
        handle.holds = {method: event for (rank, method), event in events.items() if rank == handle.spec.rank}

    crew.prepare = prepare
    both = recovery(config, crew)
    for node in nodes:
        both.replace(node, "died")  # type: ignore[arg-type]
        both.replace(node, "silent")  # type: ignore[arg-type]
    assert len(both.tasks) == 2, "a death that is told twice is one"
    for gate in order:
        await settle()
        events[gate].set()
    await done(both)
    first, second = sorted(crew.made, key=lambda handle: handle.name)
    assert crew.actors == {"scheduler-0": scheduler, "rollout-0": first, "rollout-1": second}
    assert first.connected == {"scheduler-0": scheduler, "rollout-1": second}
    assert second.connected == {"scheduler-0": scheduler, "rollout-0": first}
    assert scheduler.connected == {"rollout-0": first, "rollout-1": second}
    assert set(crew.ends.values()) == {first, second}
    assert not both.away("rollout-0") and not both.away("rollout-1")
    assert all(node.killed for node in nodes)
    for end in crew.ends:
        end.cancel()


async def test_each_process_is_told_what_took_those_before_it(config: Config) -> None:
    """Silent at first; the next one's engine fails while it starts; the third dies while it is built."""
    crew, causes = Crew(Handle("scheduler", 0), Handle("rollout", 0)), [RunFailed("rollout-0", "vLLM is gone.")]
    causes.append(Died(RunFailed("rollout-0", "rollout-0 died.")))

    def prepare(handle: Handle) -> None:
        if causes:
            handle.fails["build"] = causes.pop(0)

    crew.prepare = prepare
    again = recovery(config, crew)
    again.replace(crew.actors["rollout-0"], "silent")  # type: ignore[arg-type]
    await done(again)
    assert [(made.spec.start, made.spec.restarts) for made in crew.made] == [
        (2, {"silent": 1}),
        (3, {"silent": 1, "engine": 1}),
        (4, {"silent": 1, "engine": 1, "died": 1}),
    ]
    again.replace(crew.made[-1], "died")  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match=r"rollout-0 died 4 times in an hour, more than cluster.restarts = 3"):
        await done(again)


async def test_a_mistake_of_ours_is_not_tried_again(config: Config) -> None:
    crew = Crew(Handle("envpool", 0))

    def prepare(handle: Handle) -> None:
        handle.fails["build"] = Broken("envpool-0", "envpool-0 failed: ZeroDivisionError.")

    crew.prepare = prepare
    again = recovery(config, crew)
    again.replace(crew.actors["envpool-0"], "died")  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match="ZeroDivisionError"):
        await done(again)


async def test_where_ray_has_given_up_the_host_that_is_the_reason(config: Config) -> None:
    crew = Crew(Handle("rollout", 0))
    crew.placement = Placement(alive=False)
    again = recovery(config, crew)
    again.replace(crew.actors["rollout-0"], "died")  # type: ignore[arg-type]
    await done(again)
    assert crew.made[0].spec.restarts == {"host_lost": 1}
    for end in crew.ends:
        end.cancel()


async def test_who_has_no_place_left_stays_away_unless_it_is_the_last(config: Config) -> None:
    crew = Crew(Handle("rollout", 0), Handle("rollout", 1))
    crew.placement = Placement(alive=False, again=False)
    again = recovery(config, crew)
    again.replace(crew.actors["rollout-0"], "died")  # type: ignore[arg-type]
    await done(again)
    assert crew.made == [] and again.away("rollout-0")
    assert crew.placement.given_up == ["rollout-0"], "its host is free for others, should it come back"
    assert crew.said == [
        "rollout-0 is gone with host 1 (node1); it waits for that host for up to 600 s.",
        "rollout-0 stays away: host 1 (node1) is gone, and no other host has room for it.",
    ]
    again.replace(crew.actors["rollout-1"], "died")  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match="no other host has room for it, and it was the last one"):
        await done(again)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["rollout-1", "envpool-1"])
async def test_a_host_that_came_late_gets_a_role_and_costs_nothing_where_that_fails(
    config: Config, name: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recoveries, "NEWCOMERS_SECONDS", 600.0)
    crew = Crew(Handle("scheduler", 0), Handle("rollout", 0))
    crew.placement = Placement()
    crew.placement.names = [name]

    def prepare(handle: Handle) -> None:
        if fails:
            handle.fails["start"] = RunFailed(name, "There is no room here.")

    crew.prepare = prepare
    late = recovery(config, crew)
    late.welcome()
    await settle()
    looking = [task for task in late.tasks if not task.done()]
    assert len(looking) == 1, "it looks on for others"
    late.cancel()
    if fails:
        assert crew.made[0].killed and name not in crew.actors
        assert crew.said[-1] == f"{name} stays away: There is no room here."
    else:
        assert crew.actors[name] is crew.made[0]
        assert all(crew.actors[other].connected == {name: crew.made[0]} for other in ("scheduler-0", "rollout-0"))
    for end in crew.ends:
        end.cancel()


def test_why_another_process_may_do_better() -> None:
    node, pool = Handle("rollout", 0), Handle("envpool", 0)
    failed = {handle.name: RunFailed(handle.name, "It failed.") for handle in (node, pool)}
    found = [
        worth_another(Died(failed["envpool-0"]), pool),  # type: ignore[arg-type]
        worth_another(failed["rollout-0"], node),  # type: ignore[arg-type]
        worth_another(failed["envpool-0"], pool),  # type: ignore[arg-type]
        worth_another(Broken("rollout-0", "It broke."), node),  # type: ignore[arg-type]
        worth_another(failed["rollout-0"], pool),  # type: ignore[arg-type]
        worth_another(None, node),  # type: ignore[arg-type]
    ]
    assert found == ["died", "engine", None, None, None, None]
    assert set(get_args(Reason)) == set(RESTART_REASONS), "the metric's are the same"
