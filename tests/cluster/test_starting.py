"""Something done with several roles at once: who is late is named, and nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from segue.cluster import starting
from segue.cluster.role_handle import Died
from segue.cluster.starting import Start, for_each
from segue.errors import RunFailed

SECONDS = 20.0


def actors(*names: str) -> list[Any]:
    return [SimpleNamespace(name=name) for name in names]


async def for_ever(actor: Any) -> None:
    await asyncio.Event().wait()


async def test_a_start_that_takes_too_long_names_who_is_missing() -> None:
    async def start(actor: Any) -> None:
        if actor.name.startswith("rollout"):
            await for_ever(actor)

    roles = Start("The start of the roles", 0.05, Path("logs"))
    with pytest.raises(RunFailed, match=r"start_seconds = 0.05 \(rollout-0, rollout-1 had not come yet\): raise it"):
        await asyncio.wait_for(roles.within(roles.stage(actors("learner-0", "rollout-1", "rollout-0"), start, "done")), SECONDS)


async def test_who_is_asked_for_something_else_meanwhile_is_not_late_for_a_start() -> None:
    """Pings go on while a role is started again, and one that fails leaves the others unanswered."""

    async def ping(actor: Any) -> None:
        if actor.name == "learner-0":
            raise Died(RunFailed("learner-0", "learner-0 died."))
        await for_ever(actor)

    async def bring_up() -> None:
        with pytest.raises(RunFailed, match="learner-0 died"):
            await for_each(actors("learner-0", "envpool-0"), ping)
        await asyncio.Event().wait()

    again = Start("The restart of rollout-0", 0.05, Path("logs"))
    with pytest.raises(RunFailed, match=r"^The restart of rollout-0 took longer than cluster.start_seconds = 0.05: raise it"):
        await asyncio.wait_for(again.within(bring_up()), SECONDS)


async def test_who_waits_long_is_told_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "STILL_SECONDS", 0.01)
    said: list[str] = []
    come = asyncio.Event()

    async def start(actor: Any) -> None:
        if actor.name == "rollout-0":
            await come.wait()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            come.set()

    roles = Start("The start of the roles", SECONDS, Path("logs"), say)
    await roles.within(roles.stage(actors("learner-0", "rollout-0"), start, "done"))
    assert said[:2] == ["still starting: rollout-0"] * 2


async def test_the_late_ones_are_told_also_when_another_fails() -> None:
    late: list[list[str]] = []

    async def do(actor: Any) -> None:
        if actor.name == "b":
            raise Died(RunFailed("b", "It broke."))
        await for_ever(actor)

    with pytest.raises(RunFailed, match="It broke"):
        await asyncio.wait_for(for_each(actors("c", "b", "a"), do, late.append), SECONDS)
    assert late == [["a", "c"]]
    await for_each([], do, late.append)
    assert late == [["a", "c"]], "nobody is waited for where there is nobody"
