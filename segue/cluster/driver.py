"""The driver: starts the roles as Ray actors, connects them, watches them, and runs the course of a training.

Consumes: the end of each role's `run`, the controller's course, SIGINT. Waits for: all three, each start-up stage up to
`cluster.start_seconds`, and a pong from every role at least every `cluster.silence_seconds`. Produces: the run's summary, or the
first cause of its failure, on the report pipe to the supervisor. On cancel (SIGINT): the learner stops after its step and
writes a checkpoint, then all roles stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, TypeVar

from segue.cluster.child import Job, run_job
from segue.cluster.controller import Controller
from segue.cluster.cores import pin
from segue.cluster.hosts.plan import read_hosts
from segue.cluster.placement import Placement
from segue.cluster.ray_cluster import ray_of
from segue.cluster.restarts import Restarts
from segue.cluster.role_handle import Broken, Died, RoleHandle, first_cause
from segue.cluster.roles import GET_FACTS, Facts, GetFacts, RoleSpec
from segue.config import to_toml
from segue.errors import RunFailed, UserError
from segue.ports.rpc import PeerError, RemoteError, ask

log = logging.getLogger("segue.cluster.driver")  # run as __main__

T = TypeVar("T")
NEWCOMERS_SECONDS = 5.0
"""How often it is looked whether a host has come that nobody knew of."""
COUNTED_SECONDS = 2.0
"""How long a step's line waits for what the roles have counted; it is written without those that do not answer."""


class Driver:
    """One run on Ray. `run` returns the exit code."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._run = job.run
        self._config = job.config
        self._report = job.report
        self._actors: dict[str, RoleHandle] = {}
        self._ends: dict[asyncio.Task[Any], RoleHandle] = {}
        self._restarts: set[asyncio.Task[Any]] = set()
        self._silent: set[str] = set()
        self._late: list[str] = []
        self._counts = Restarts(job.config.cluster.restarts)
        self._away: set[str] = set()
        self._left: set[str] = set()
        self._placement: Placement | None = None
        self._interrupted = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted.set)
        pin(os.getpid(), self._config.cluster.cores, "cluster.cores")  # Ray, and the roles that name none, inherit them
        began = loop.time()
        if plan := read_hosts(self._run):
            self._placement = Placement(self._config, plan)
        self._say(f"starting the roles on the Ray at {plan.ray}" if plan and plan.ray else "starting Ray and the roles")
        cluster = ray_of(self._config, self._job.scratch, plan)
        log.info("Ray runs after %.1f s", loop.time() - began)
        try:
            for pid, part in cluster.processes():
                self._report.process(pid, part, fatal=True)
            if self._placement is not None:
                self._report.ray(cluster.address)
                await self._placement.gathered(self._config.cluster.start_seconds)
                self._say(f"all {len(plan.hosts) if plan else 1} hosts are nodes of Ray after {loop.time() - began:.1f} s")
            await self._within_start("The start of the roles", self._start())
            self._report.started()
            self._say(f"all {len(self._actors)} roles run after {loop.time() - began:.1f} s")
            code = await self._course()
            self._report.result(code)
        finally:
            self._report.stopping()
            await self._stop()
            cluster.stop()
        return code

    # --- start --------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        config = self._config
        for role, count, gpus in (  # those that take longest to build come first
            ("learner", config.learner.ranks, config.learner.gpus),
            ("rollout", config.rollout.nodes, config.rollout.gpus),
            ("scheduler", 1, 0.0),
            ("envpool", config.envpool.pools, 0.0),
        ):
            for rank in range(count):
                actor = self._create(role, rank, count, gpus)
                self._actors[actor.name] = actor
        await self._each(self._actors.values(), self._pid, "the roles have processes")
        ranks = [actor for actor in self._actors.values() if actor.spec.role == "learner"]
        meet = await self._meeting(ranks[0]) if len(ranks) > 1 else ""
        await self._each(self._actors.values(), functools.partial(self._build, meet=meet), "the roles are built")
        for actor in self._actors.values():
            for other in self._actors.values():
                if actor is not other:
                    await actor.remote("connect", other.name, other.handle)
        for roles in (("scheduler",), ("envpool",), ("rollout", "learner")):
            group = [actor for actor in self._actors.values() if actor.spec.role in roles]
            await self._each(group, lambda actor: actor.remote("start"), f"{' and '.join(roles)} started")
        for actor in self._actors.values():
            self._watch(actor)

    def _create(self, role: str, rank: int, world: int, gpus: float) -> RoleHandle:
        name = f"{role}-{rank}"
        placement = self._placement
        path = os.path.abspath if placement is not None else str  # processes on other hosts may begin in another folder
        spec = RoleSpec(
            role=role,
            rank=rank,
            world=world,
            run_dir=path(self._run.path),
            config=to_toml(self._config),
            model_path=path(self._job.model),
            resume=path(self._job.resume) if self._job.resume else "",
            attempt=self._job.attempt,
            address=placement.address_of(name) if placement is not None else "",
            start=self._counts.start(name),
        )
        if placement is None:
            return RoleHandle(spec, gpus)
        return RoleHandle(spec, gpus, placement.options(name), here=placement.host_of(name) == 0)

    async def _meeting(self, first: RoleHandle) -> str:
        """Where the learner ranks meet: at rank 0."""
        host = first.spec.address or self._config.cluster.interface
        return f"{host}:{await first.remote('free_port', 'the learner ranks')}"

    async def _pid(self, actor: RoleHandle) -> None:
        pid = await actor.remote("pid")
        if actor.here:  # others are out of the supervisor's sight: Ray tells of their deaths
            self._report.process(pid, actor.name, fatal=actor.fatal)
        log.info("%s has process %d", actor.name, pid)

    async def _build(self, actor: RoleHandle, meet: str = "") -> None:
        await actor.remote("build", meet)

    def _say(self, line: str) -> None:
        print(line, file=self._job.console, flush=True)

    def _watch(self, actor: RoleHandle) -> None:
        self._ends[asyncio.create_task(actor.remote("run"))] = actor

    async def _each(
        self, actors: Iterable[RoleHandle], do: Callable[[RoleHandle], Coroutine[Any, Any, Any]], done_is: str = ""
    ) -> None:
        """`do` for all at once; the first failure is raised at once, deaths before others. `done_is` goes to the log."""
        began = asyncio.get_running_loop().time()
        tasks = {asyncio.create_task(do(actor)): actor.name for actor in actors}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failed = [task for task in done if task.exception() is not None]
            if failed:
                raise await first_cause(failed, list(tasks))
            if done_is:
                log.info("%s after another %.1f s", done_is, asyncio.get_running_loop().time() - began)
        finally:
            self._late = sorted(name for task, name in tasks.items() if not task.done())
            for task in tasks:
                task.cancel()

    async def _within_start(self, what: str, work: Awaitable[T]) -> T:
        seconds = self._config.cluster.start_seconds
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            waited = f" ({', '.join(self._late)} had not come yet)" if self._late else ""
            raise RunFailed(
                "start",
                f"{what} took longer than cluster.start_seconds = {seconds:g}{waited}: raise it, for instance "
                f"with --set cluster.start_seconds=600, or look into {self._run.logs}.",
            ) from None

    # --- course -------------------------------------------------------------------------------------------------------

    async def _course(self) -> int:
        learners = [task for task, actor in self._ends.items() if actor.spec.role == "learner"]
        learned = asyncio.gather(*learners, return_exceptions=True)
        scheduler, console = self._actors["scheduler-0"].peer, self._job.console
        only_eval = self._job.only_eval
        controller = Controller(self._config, self._run, scheduler, learned, console, self._counted, only_eval=only_eval)
        course = asyncio.create_task(controller.run())
        silence = asyncio.create_task(self._watch_silence())
        beating = asyncio.create_task(self._beat())
        interrupt = asyncio.create_task(self._interrupted.wait())
        if self._placement is not None:
            self._restarts.add(asyncio.create_task(self._welcome()))
        try:
            await self._until_end(course, silence, interrupt)
            if interrupt.done() and not course.done():
                self._report.stopping()
                try:
                    await self._interrupt(course, learned)
                finally:
                    await controller.catch_up()
                return 130
            facts = await self._facts()
            controller.finish(facts, silent=[name for name in self._actors if name not in facts])
            await controller.stop("the run is done")
            return 0
        except (RunFailed, UserError) as failure:
            if "scheduler-0" not in self._silent:
                await _end(course)
                await controller.catch_up()
            await controller.stop(str(failure))
            raise
        finally:
            for task in (course, silence, beating, interrupt, *self._restarts):
                task.cancel()

    async def _until_end(self, course: asyncio.Task[Any], silence: asyncio.Task[Any], interrupt: asyncio.Task[Any]) -> None:
        """Until the course is over or interrupted; raises the first cause when a part fails."""
        while True:
            waiting = {course, silence, interrupt, *self._restarts, *self._ends}
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failed = []
            for task in done - {interrupt}:
                actor = self._ends.pop(task, None)
                self._restarts.discard(task)
                if task.cancelled():  # the end of a silent one is not waited for
                    continue
                error = task.exception()
                if actor is not None and not actor.fatal and _worth_another(error, actor):
                    self._begin_restart(actor)
                elif error is not None:
                    failed.append(task)
            if failed:
                raise await first_cause(failed, self._ends)
            if course.done() or interrupt.done():
                return

    def _begin_restart(self, dead: RoleHandle) -> None:
        if dead.name not in self._away:
            self._away.add(dead.name)
            self._restarts.add(asyncio.create_task(self._restart(dead)))

    async def _restart(self, dead: RoleHandle) -> None:
        """Put a new process in the place of a dead one; the run goes on meanwhile, without it."""
        name, gpus = dead.name, self._config.rollout.gpus if dead.spec.role == "rollout" else 0.0
        while True:
            deaths = self._counts.died(name, asyncio.get_running_loop().time())
            if self._counts.too_many(name):
                times = "once" if deaths == 1 else f"{deaths} times"
                raise RunFailed(
                    name,
                    f"{name} died {times} in an hour, more than cluster.restarts = {self._counts.limit}: see {dead.spec.log}.",
                )
            dead.kill()
            if self._placement is not None and not await self._placement.seat_again(name):
                return self._leave_out(dead)
            where = f" on {self._placement.describe(name)}" if self._placement is not None else ""
            log.warning("%s died; starting it again%s (%d of %d)", name, where, deaths, self._counts.limit)
            self._say(f"{name} died; starting it again{where}, its episodes go on from what the scheduler has of them.")
            dead = self._create(dead.spec.role, dead.spec.rank, dead.spec.world, gpus)
            try:
                return await self._within_start(f"The restart of {name}", self._bring_up(dead))
            except RunFailed as failure:
                lost = self._placement is not None and not self._placement.there(name)  # Ray may learn late that a host is gone
                if not lost and not _worth_another(failure, dead):
                    raise

    def _leave_out(self, dead: RoleHandle) -> None:
        """Its host is gone and there is no other place for it. Raises `RunFailed` where it was the last of its role."""
        self._left.add(dead.name)
        others = [a for a in self._actors.values() if a.spec.role == dead.spec.role and a.name not in self._left]
        where = self._placement.describe(dead.name) if self._placement is not None else "its host"
        if not others:
            raise RunFailed(
                dead.name, f"{dead.name} is gone with {where}, no other host has room for it, and it was the last one."
            )
        self._say(f"{dead.name} stays away: {where} is gone, and no other host has room for it.")

    async def _bring_up(self, actor: RoleHandle) -> None:
        """Build, connect and start one role while the others run; then it belongs to the run."""
        await self._pid(actor)
        await self._build(actor)
        known = {other.name: other for other in self._actors.values() if other.name != actor.name}
        for other in known.values():  # also those that are away: what takes their place tells it
            await actor.remote("connect", other.name, other.handle)
        await actor.remote("start")
        self._actors[actor.name] = actor  # from here on, who is brought up meanwhile learns of it
        for other in [other for other in self._actors.values() if other is not actor]:
            if known.get(other.name) is not other:
                await actor.remote("connect", other.name, other.handle)
            if other.name not in self._away:
                with contextlib.suppress(*(() if other.fatal else (Died,))):  # its own end tells
                    await other.remote("connect", actor.name, actor.handle)
        self._away.discard(actor.name)
        self._watch(actor)

    async def _welcome(self) -> None:
        """Wait for hosts that come while the run goes on. Ends when some have: `_until_end` then sees what is done with them."""
        assert self._placement is not None
        while not (names := self._placement.newcomers()):  # noqa: ASYNC110 - Ray tells nobody
            await asyncio.sleep(NEWCOMERS_SECONDS)
        for work in (*map(self._take_in, names), self._welcome()):
            self._restarts.add(asyncio.create_task(work))

    async def _take_in(self, name: str) -> None:
        """Start a rollout node on a host that came late. The run was whole without it, and goes on so where that fails."""
        assert self._placement is not None
        self._say(f"{name} starts on {self._placement.describe(name)}.")
        self._away.add(name)
        world = self._config.rollout.nodes
        actor = self._create("rollout", int(name.rpartition("-")[2]), world, self._config.rollout.gpus)
        try:
            await self._within_start(f"The start of {name}", self._bring_up(actor))
        except (RunFailed, UserError) as failure:
            self._actors.pop(name, None)
            actor.kill()
            self._say(f"{name} stays away: {failure}")

    async def _watch_silence(self) -> None:
        """Raises when a role does not answer a ping: stopped or stuck, it would otherwise hang the run in silence."""
        seconds = self._config.cluster.silence_seconds

        async def ping(actor: RoleHandle) -> None:
            try:
                async with asyncio.timeout(seconds):
                    await actor.remote("pid")
            except TimeoutError:
                if not actor.fatal:
                    self._say(f"{actor.name} has not answered for cluster.silence_seconds = {seconds:g}: it is ended.")
                    return self._end_silent(actor)
                self._silent.add(actor.name)
                raise RunFailed(
                    actor.name, f"{actor.name} has not answered for cluster.silence_seconds = {seconds:g}: see {actor.spec.log}."
                ) from None
            except Died:
                pass  # the end of its `run` tells

        while True:
            await self._each([actor for actor in self._actors.values() if actor.name not in self._away], ping)
            await asyncio.sleep(seconds / 3)

    def _end_silent(self, actor: RoleHandle) -> None:
        """A node or pool that is stuck or out of reach: its `run` will tell of no death, so this does."""
        if self._actors.get(actor.name) is not actor or actor.name in self._away:
            return  # another process has its place already
        for task in [task for task, other in self._ends.items() if other is actor]:
            del self._ends[task]
            task.cancel()
        self._begin_restart(actor)

    async def _beat(self) -> None:
        """The supervisor watches this process as it watches the roles."""
        while True:
            self._report.alive()
            await asyncio.sleep(self._config.cluster.silence_seconds / 3)

    async def _interrupt(self, course: asyncio.Task[Any], learned: asyncio.Future[Any]) -> None:
        """Ctrl-C: the learner ends its step and writes a checkpoint. Raises what it could not do."""
        await _end(course)
        await self._each((a for a in self._actors.values() if a.spec.role == "learner"), lambda actor: actor.remote("stop"))
        errors = [end for end in await learned if isinstance(end, BaseException)]
        if errors:
            raise next((error for error in errors if isinstance(error, Died)), errors[0])

    def _present(self) -> list[RoleHandle]:
        """Those that can be expected to answer."""
        return [a for a in self._actors.values() if a.name not in self._away and a.name not in self._silent]

    async def _facts(self, names: Collection[str] = (), timeout: float = 10.0) -> dict[str, Facts]:
        """Of all roles that answer in time; `names`: these metrics alone."""
        facts: dict[str, Facts] = {}

        async def tell(actor: RoleHandle) -> None:
            with contextlib.suppress(PeerError, RemoteError):
                facts[actor.name] = await ask(actor.peer, GET_FACTS, GetFacts([*names]), timeout)

        await asyncio.gather(*map(tell, self._present()))
        return facts

    async def _counted(self, names: Collection[str]) -> dict[str, Facts]:
        return await self._facts(names, COUNTED_SECONDS)

    async def _stop(self) -> None:
        """Stop all roles, nodes before pools and the scheduler last; those that are dead or do not answer are left to Ray."""
        for roles in (("learner", "rollout"), ("envpool",), ("scheduler",)):
            group = [a for a in self._present() if a.spec.role in roles]
            tasks = [asyncio.create_task(actor.remote("stop")) for actor in group]
            if tasks:
                await asyncio.wait(tasks, timeout=self._config.cluster.stop_seconds)
            for task in tasks:
                task.cancel()
        for end in self._ends:
            end.cancel()


def _worth_another(error: BaseException | None, actor: RoleHandle) -> bool:
    """Whether a new process may do better: this one is gone, or the engine of a node is (vLLM's processes, a GPU).

    Not for a mistake in the config or of our own, which it would meet again.
    """
    if not isinstance(error, RunFailed) or error.part != actor.name or isinstance(error, Broken):
        return False
    return isinstance(error, Died) or actor.spec.role == "rollout"


async def _end(course: asyncio.Task[Any]) -> None:
    """Cancel the course and wait until it is over; its own failure, if it has one, is known already."""
    course.cancel()
    await asyncio.wait([course])


def main() -> int:
    """`python -m segue.cluster.driver`: started by the supervisor."""
    return run_job("driver", lambda job: asyncio.run(Driver(job).run()))


if __name__ == "__main__":
    status = main()
    os._exit(status)  # Ray's and torch's exit handlers have nothing left to do, and may wait for threads that will not end
