"""The driver: starts the roles as Ray actors, connects them, watches them, and runs the course of a training.

Consumes: the end of each role's `run`, the controller's course, SIGINT. Waits for: all three, each start-up stage up to
`cluster.start_seconds`, and a pong from every role at least every `cluster.silence_seconds`. Produces: the run's summary, or the
first cause of its failure, on the report pipe to the supervisor. On cancel (SIGINT): the learner stops after its step and
writes a checkpoint, then all roles stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

import ray.exceptions

from segue import wire
from segue.cluster.actor import RoleActor
from segue.cluster.child import Job, run_job
from segue.cluster.controller import Controller
from segue.cluster.cores import pin
from segue.cluster.peers import RayPeer
from segue.cluster.ports import free_port
from segue.cluster.ray_cluster import RayCluster, create_actor
from segue.cluster.roles import GET_FACTS, Facts, GetFacts, RoleSpec
from segue.cluster.supervisor import died
from segue.config import to_toml
from segue.errors import RunFailed, UserError
from segue.ports.rpc import Failure, PeerError, RemoteError, ask
from segue.rundir import RunDir

log = logging.getLogger("segue.cluster.driver")  # run as __main__

T = TypeVar("T")
MAX_POOL_RESTARTS = 5
COUNTED_SECONDS = 2.0
"""How long a step's line waits for what the roles have counted; it is written without those that do not answer."""
DEATHS_SETTLE_SECONDS = 1.0
"""A role may fail because another died; the news of the death may come a little later than the failure."""


class _Actor:
    """One role's actor as the driver sees it."""

    def __init__(self, spec: RoleSpec, gpus: float) -> None:
        self.spec = spec
        self.name = spec.name
        self.handle = create_actor(RoleActor, (wire.encode(spec),), gpus)
        self.peer = RayPeer(self.name, self.handle)

    @property
    def fatal(self) -> bool:
        """Whether the run ends with this role. A pool is started anew; its episodes go on from their snapshots."""
        return self.spec.role != "envpool"

    async def remote(self, method: str, *arguments: Any) -> Any:
        """Call an actor method; a dead actor is `Died`, a `Failure` it returned a `RunFailed` or `UserError`."""
        try:
            reply = await asyncio.wrap_future(getattr(self.handle, method).remote(*arguments).future())
        except ray.exceptions.RayError as error:
            log.info("%s does not answer %s any more: %s", self.name, method, error)
            raise Died(died(self.name, RunDir(Path(self.spec.run_dir)))) from None
        if isinstance(reply, bytes):
            with contextlib.suppress(wire.UnknownMessage):
                failure = wire.decode(reply, Failure)
                raise UserError(failure.sentence) if failure.fault == "user" else RunFailed(failure.error, failure.sentence)
        return reply


class Died(RunFailed):
    """A role's process is gone: the first cause of whatever else fails in the same moments."""

    def __init__(self, failed: RunFailed) -> None:
        super().__init__(failed.part, failed.sentence)


async def first_cause(failed: Iterable[asyncio.Task[Any]], others: Iterable[asyncio.Task[Any]]) -> BaseException:
    """The death among the errors of `failed`, and of `others` if they fail within moments; without one, the first error."""
    errors = [error for task in failed if (error := task.exception()) is not None]
    pending = [task for task in others if not task.done()]
    if pending and not any(isinstance(error, Died) for error in errors):
        done, _ = await asyncio.wait(pending, timeout=DEATHS_SETTLE_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
        errors += [error for task in done if not task.cancelled() and (error := task.exception()) is not None]
    return next((error for error in errors if isinstance(error, Died)), errors[0])


class Driver:
    """One run on Ray. `run` returns the exit code."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._run = job.run
        self._config = job.config
        self._report = job.report
        self._actors: dict[str, _Actor] = {}
        self._ends: dict[asyncio.Task[Any], _Actor] = {}
        self._restarts: set[asyncio.Task[Any]] = set()
        self._silent: set[str] = set()
        self._late: list[str] = []
        self._pool_restarts = 0
        self._rendezvous = ""
        self._interrupted = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted.set)
        pin(os.getpid(), self._config.cluster.cores, "cluster.cores")  # Ray, and the roles that name none, inherit them
        self._say("starting Ray and the roles")
        began = loop.time()
        cluster = RayCluster(self._config, self._job.scratch)
        log.info("Ray runs after %.1f s", loop.time() - began)
        try:
            for pid, part in cluster.processes():
                self._report.process(pid, part, fatal=True)
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
        await self._each(self._actors.values(), self._build, "the roles are built")
        for actor in self._actors.values():
            for other in self._actors.values():
                if actor is not other:
                    await actor.remote("connect", other.name, other.handle)
        for roles in (("scheduler",), ("envpool",), ("rollout", "learner")):
            group = [actor for actor in self._actors.values() if actor.spec.role in roles]
            await self._each(group, lambda actor: actor.remote("start"), f"{' and '.join(roles)} started")
        for actor in self._actors.values():
            self._watch(actor)

    def _create(self, role: str, rank: int, world: int, gpus: float) -> _Actor:
        rendezvous = ""
        if role == "learner" and world > 1:
            rendezvous = self._rendezvous = self._rendezvous or self._free_address()
        spec = RoleSpec(
            role=role,
            rank=rank,
            world=world,
            run_dir=str(self._run.path),
            config=to_toml(self._config),
            model_path=self._job.model,
            rendezvous=rendezvous,
            resume=self._job.resume,
            attempt=self._job.attempt,
        )
        return _Actor(spec, gpus)

    def _free_address(self) -> str:
        interface = self._config.cluster.interface
        return f"{interface}:{free_port(interface, self._config.cluster.ports, 'the learner ranks')}"

    async def _build(self, actor: _Actor) -> None:
        self._report.process(await actor.remote("pid"), actor.name, fatal=actor.fatal)
        log.info("%s has a process", actor.name)
        await actor.remote("build")

    def _say(self, line: str) -> None:
        print(line, file=self._job.console, flush=True)

    def _watch(self, actor: _Actor) -> None:
        self._ends[asyncio.create_task(actor.remote("run"))] = actor

    async def _each(self, actors: Iterable[_Actor], do: Callable[[_Actor], Coroutine[Any, Any, Any]], done_is: str = "") -> None:
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
                error = task.exception()
                if actor is not None and not actor.fatal and isinstance(error, Died):
                    self._restarts.add(asyncio.create_task(self._restart_pool(actor)))
                elif error is not None:
                    failed.append(task)
            if failed:
                raise await first_cause(failed, self._ends)
            if course.done() or interrupt.done():
                return

    async def _restart_pool(self, dead: _Actor) -> None:
        """Put a new pool in the place of a dead one; the run goes on meanwhile, without environments."""
        while True:
            self._pool_restarts += 1
            if self._pool_restarts > MAX_POOL_RESTARTS:
                raise RunFailed(dead.name, f"Env pools died {self._pool_restarts} times: see {self._run.log_of(dead.name)}.")
            log.warning("%s died; starting it again (%d of %d)", dead.name, self._pool_restarts, MAX_POOL_RESTARTS)
            self._say(f"{dead.name} died; starting it again, its episodes go on from their snapshots.")
            pool = self._create("envpool", dead.spec.rank, dead.spec.world, 0.0)
            try:
                return await self._within_start(f"The restart of {dead.name}", self._bring_up(pool))
            except Died as failure:
                if failure.part != pool.name:
                    raise

    async def _bring_up(self, pool: _Actor) -> None:
        await self._build(pool)
        others = [actor for actor in self._actors.values() if actor.name != pool.name]
        for other in others:
            await pool.remote("connect", other.name, other.handle)
        await pool.remote("start")
        for other in others:
            await other.remote("connect", pool.name, pool.handle)
        self._actors[pool.name] = pool
        self._watch(pool)

    async def _watch_silence(self) -> None:
        """Raises when a role does not answer a ping: stopped or stuck, it would otherwise hang the run in silence."""
        seconds = self._config.cluster.silence_seconds

        async def ping(actor: _Actor) -> None:
            try:
                async with asyncio.timeout(seconds):
                    await actor.remote("pid")
            except TimeoutError:
                self._silent.add(actor.name)
                log_path = self._run.log_of(actor.name)
                raise RunFailed(
                    actor.name, f"{actor.name} has not answered for cluster.silence_seconds = {seconds:g}: see {log_path}."
                ) from None
            except Died:
                pass  # the end of its `run` tells

        while True:
            await self._each(list(self._actors.values()), ping)
            await asyncio.sleep(seconds / 3)

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

    async def _facts(self, names: Collection[str] = (), timeout: float = 10.0) -> dict[str, Facts]:
        """Of all roles that answer in time; `names`: these metrics alone."""
        facts: dict[str, Facts] = {}

        async def tell(actor: _Actor) -> None:
            with contextlib.suppress(PeerError, RemoteError):
                facts[actor.name] = await ask(actor.peer, GET_FACTS, GetFacts([*names]), timeout)

        await asyncio.gather(*map(tell, self._actors.values()))
        return facts

    async def _counted(self, names: Collection[str]) -> dict[str, Facts]:
        return await self._facts(names, COUNTED_SECONDS)

    async def _stop(self) -> None:
        """Stop all roles, nodes before pools and the scheduler last; those that are dead or do not answer are left to Ray."""
        for roles in (("learner", "rollout"), ("envpool",), ("scheduler",)):
            group = [a for a in self._actors.values() if a.spec.role in roles and a.name not in self._silent]
            tasks = [asyncio.create_task(actor.remote("stop")) for actor in group]
            if tasks:
                await asyncio.wait(tasks, timeout=self._config.cluster.stop_seconds)
            for task in tasks:
                task.cancel()
        for end in self._ends:
            end.cancel()


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
