"""Role processes that come up while the run goes on: in the place of dead ones, and on hosts that came late.

consumes       deaths that the driver saw (`replace`); hosts that nobody knew of (`welcome`)
produces       processes that belong to the run: built, connected to all others, watched (`Crew`)
waits for      a place to start, as `Placement` has it; each start, up to `cluster.start_seconds`
unblocked by   the process, or the deadline: another try, or the end of the run with the sentence
on cancel      what was under way is left to the end of Ray
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Literal

from segue.cluster.crew import Crew
from segue.cluster.placement import Placement
from segue.cluster.restarts import Restarts
from segue.cluster.role_handle import Broken, Died, RoleHandle
from segue.cluster.starting import Start
from segue.config import Config
from segue.errors import RunFailed, UserError
from segue.rundir import RunDir

log = logging.getLogger("segue.cluster.driver")

NEWCOMERS_SECONDS = 5.0
"""How often it is looked whether a host has come that nobody knew of."""

Reason = Literal["died", "silent", "engine", "host_lost"]
"""Why a process was replaced (`RESTART_REASONS` of `segue.metrics.vocabulary`)."""


def worth_another(error: BaseException | None, actor: RoleHandle) -> Reason | None:
    """Why a new process may do better: this one is gone, or the engine of a node is (vLLM's processes, a GPU).

    None for a mistake in the config or of our own, which it would meet again.
    """
    if not isinstance(error, RunFailed) or error.part != actor.name or isinstance(error, Broken):
        return None
    if isinstance(error, Died):
        return "died"
    return "engine" if actor.spec.role == "rollout" else None


class Recovery:
    """See the module. `tasks` are its work under way: the driver waits for them as for all else, and takes those out that are
    done; one that raises ends the run."""

    def __init__(self, config: Config, run: RunDir, crew: Crew) -> None:
        self._config = config
        self._run = run
        self._crew = crew
        self._counts = Restarts(config.cluster.restarts)
        self._away: set[str] = set()
        self._left: set[str] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    def away(self, name: str) -> bool:
        """Whether a role is without a process that could answer."""
        return name in self._away

    def replace(self, dead: RoleHandle, reason: Reason) -> None:
        """Begin to put a new process in the place of a dead one; the run goes on meanwhile, without it."""
        if dead.name not in self._away:
            self._away.add(dead.name)
            self.tasks.add(asyncio.create_task(self._restart(dead, reason)))

    def welcome(self) -> None:
        """From now on rollout nodes and pools start on hosts that come late, as far as `Placement.newcomers` finds room."""
        if (placement := self._crew.placement) is not None:
            self.tasks.add(asyncio.create_task(self._welcome(placement)))

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    # --- in the place of the dead -------------------------------------------------------------------------------------

    async def _restart(self, dead: RoleHandle, reason: Reason) -> None:
        name, placement = dead.name, self._crew.placement
        while True:
            if self._lost(name):
                reason = "host_lost"
            deaths = self._counts.died(name, reason, asyncio.get_running_loop().time())
            if self._counts.too_many(name):
                times = "once" if deaths == 1 else f"{deaths} times"
                raise RunFailed(
                    name,
                    f"{name} died {times} in an hour, more than cluster.restarts = {self._counts.limit}: see {dead.spec.log}.",
                )
            dead.kill()
            if placement is not None and dead.spec.role == "rollout" and self._lost(name):
                seconds = self._config.cluster.absence_seconds
                self._crew.say(f"{name} is gone with {placement.describe(name)}; it waits for that host for up to {seconds:g} s.")
            if placement is not None and not await placement.seat_again(name):
                return self._leave_out(dead)
            where = f" on {placement.describe(name)}" if placement is not None else ""
            log.warning("%s died (%s); starting it again%s (%d of %d)", name, reason, where, deaths, self._counts.limit)
            self._crew.say(f"{name} died; starting it again{where}, its episodes go on from what the scheduler has of them.")
            dead = self._crew.create(dead.spec.role, dead.spec.rank, dead.spec.start + 1, self._counts.reasons(name))
            try:
                return await self._start(f"The restart of {name}").within(self._bring_up(dead))
            except RunFailed as failure:
                again = worth_another(failure, dead) or ("host_lost" if self._lost(name) else None)
                if again is None:
                    raise
                reason = again

    def _lost(self, name: str) -> bool:
        """Whether Ray knows by now that the role's host is gone; it may learn it late."""
        return self._crew.placement is not None and not self._crew.placement.there(name)

    def _leave_out(self, dead: RoleHandle) -> None:
        """Its host is gone and there is no other place for it. Raises `RunFailed` where it was the last of its role."""
        self._left.add(dead.name)
        others = [actor for actor in self._crew.of(dead.spec.role) if actor.name not in self._left]
        placement = self._crew.placement
        where = placement.describe(dead.name) if placement is not None else "its host"
        if not others:
            raise RunFailed(
                dead.name, f"{dead.name} is gone with {where}, no other host has room for it, and it was the last one."
            )
        self._crew.say(f"{dead.name} stays away: {where} is gone, and no other host has room for it.")
        if placement is not None:
            placement.give_up(dead.name)

    def _start(self, what: str) -> Start:
        return Start(what, self._config.cluster.start_seconds, self._run.logs)

    async def _bring_up(self, actor: RoleHandle) -> None:
        """Build, connect and start one role while the others run; then it belongs to the run."""
        actors = self._crew.actors
        await self._crew.find_pid(actor)
        await actor.remote("build", "")
        known = {other.name: other for other in actors.values() if other.name != actor.name}
        for other in known.values():  # also those that are away: what takes their place tells it
            await actor.remote("connect", other.name, other.handle)
        await actor.remote("start")
        actors[actor.name] = actor  # from here on, who is brought up meanwhile learns of it
        for other in [other for other in actors.values() if other is not actor]:
            if known.get(other.name) is not other:
                await actor.remote("connect", other.name, other.handle)
            if other.name not in self._away:
                with contextlib.suppress(*(() if other.fatal else (Died,))):  # its own end tells
                    await other.remote("connect", actor.name, actor.handle)
        self._away.discard(actor.name)
        self._crew.watch(actor)

    # --- on hosts that came late --------------------------------------------------------------------------------------

    async def _welcome(self, placement: Placement) -> None:
        """Ends when a host has come: whoever waits for `tasks` then waits for what is done with it, too."""
        while not (names := placement.newcomers()):  # noqa: ASYNC110 - Ray tells nobody
            await asyncio.sleep(NEWCOMERS_SECONDS)
        for work in (*(self._take_in(name, placement) for name in names), self._welcome(placement)):
            self.tasks.add(asyncio.create_task(work))

    async def _take_in(self, name: str, placement: Placement) -> None:
        """Start a role on a host that came late. The run was whole without it, and goes on so where that fails."""
        self._crew.say(f"{name} starts on {placement.describe(name)}.")
        self._away.add(name)
        role, _, rank = name.rpartition("-")
        actor = self._crew.create(role, int(rank))
        try:
            await self._start(f"The start of {name}").within(self._bring_up(actor))
        except (RunFailed, UserError) as failure:
            self._crew.actors.pop(name, None)
            actor.kill()
            why = "its process or its host went while it started" if isinstance(failure, Died) else str(failure)
            self._crew.say(f"{name} stays away: {why}")
