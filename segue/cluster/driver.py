"""The driver: starts the roles as Ray actors, connects them, watches them, and runs the course of a training.

Consumes: the end of each role's `run`, the controller's course, SIGINT. Waits for: all three, each start-up stage up to
`cluster.start_seconds`, and a pong from every role at least every `cluster.silence_seconds`. Produces: the run's summary, or the
first cause of its failure, on the report pipe to the supervisor. On cancel (SIGINT): the learner stops after its step and
writes a checkpoint, then all roles stop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import ray.exceptions

from segue import wire
from segue.cluster.actor import RoleActor, failure_of
from segue.cluster.controller import Controller
from segue.cluster.peers import RayPeer
from segue.cluster.ports import free_port
from segue.cluster.ray_cluster import RayCluster, create_actor
from segue.cluster.roles import GET_FACTS, Facts, GetFacts, RoleSpec
from segue.cluster.supervisor import Report
from segue.config import Config, load_config, to_toml
from segue.errors import RunFailed
from segue.logs import ProcessLog
from segue.ports.rpc import Failure, PeerError, ask
from segue.rundir import RunDir

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_POOL_RESTARTS = 5
DEATHS_SETTLE_SECONDS = 1.0
"""A role may fail because another died; the news of the death may come a little later than the failure."""


class _Actor:
    """One role's actor as the driver sees it."""

    def __init__(self, spec: RoleSpec, gpus: float) -> None:
        self.spec = spec
        self.name = spec.name
        self.handle = create_actor(RoleActor, spec.name, (wire.encode(spec),), gpus)
        self.peer = RayPeer(self.name, self.handle)

    @property
    def fatal(self) -> bool:
        """Whether the run ends with this role. A pool is started anew; its episodes go on from their snapshots."""
        return self.spec.role != "envpool"

    async def remote(self, method: str, *arguments: Any) -> Any:
        """Call an actor method; a dead actor is a `RunFailed` that names it, a `Failure` it returned as well."""
        try:
            reply = await asyncio.wrap_future(getattr(self.handle, method).remote(*arguments).future())
        except ray.exceptions.RayError as error:
            raise Died(self.name, error) from None
        if isinstance(reply, bytes):
            with contextlib.suppress(wire.UnknownMessage):
                failure = wire.decode(reply, Failure)
                raise RunFailed(failure.error, failure.sentence)
        return reply


class Died(RunFailed):
    """A role's process is gone."""

    def __init__(self, part: str, error: Exception) -> None:
        super().__init__(part, f"{part} died ({type(error).__name__}) and the run cannot go on without it: see its log.")


class Driver:
    """One run on Ray. `run` returns the exit code."""

    def __init__(
        self, run: RunDir, config: Config, model: str, resume: str, attempt: int, only_eval: bool, report: Report
    ) -> None:
        self._run = run
        self._config = config
        self._model = model
        self._resume = resume
        self._attempt = attempt
        self._only_eval = only_eval
        self._report = report
        self._actors: dict[str, _Actor] = {}
        self._ends: dict[asyncio.Task[Any], _Actor] = {}
        self._pool_restarts = 0
        self._interrupted = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted.set)
        cluster = RayCluster(self._config)
        try:
            for pid, part in cluster.processes():
                self._report.process(pid, part, fatal=True)
            await self._within_start("the start of the roles", self._start())
            code = await self._course()
        finally:
            self._report.stopping()
            await self._stop()
            cluster.stop()
        return code

    # --- start --------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        config = self._config
        for role, count, gpus in (
            ("scheduler", 1, 0.0),
            ("envpool", config.envpool.pools, 0.0),
            ("rollout", config.rollout.nodes, config.rollout.gpus),
            ("learner", config.learner.ranks, config.learner.gpus),
        ):
            for rank in range(count):
                self._create(role, rank, count, gpus)
        await self._each(self._actors.values(), self._introduce)
        await self._each(self._actors.values(), lambda actor: actor.remote("build"))
        for actor in self._actors.values():
            for other in self._actors.values():
                if actor is not other:
                    await actor.remote("connect", other.name, other.handle)
        for roles in (("scheduler",), ("envpool",), ("rollout", "learner")):
            await self._each((a for a in self._actors.values() if a.spec.role in roles), lambda actor: actor.remote("start"))
        for actor in self._actors.values():
            self._watch(actor)

    def _create(self, role: str, rank: int, world: int, gpus: float) -> _Actor:
        rendezvous = ""
        if role == "learner" and world > 1:
            rendezvous = self._rendezvous = getattr(self, "_rendezvous", "") or self._free_address()
        spec = RoleSpec(
            role=role,
            rank=rank,
            world=world,
            run_dir=str(self._run.path),
            config=to_toml(self._config),
            model_path=self._model,
            rendezvous=rendezvous,
            resume=self._resume,
            attempt=self._attempt,
        )
        actor = _Actor(spec, gpus)
        self._actors[actor.name] = actor
        return actor

    def _free_address(self) -> str:
        interface = self._config.cluster.interface
        return f"{interface}:{free_port(interface, self._config.cluster.ports, 'the learner ranks')}"

    async def _introduce(self, actor: _Actor) -> None:
        self._report.process(await actor.remote("pid"), actor.name, fatal=actor.fatal)

    def _watch(self, actor: _Actor) -> None:
        self._ends[asyncio.create_task(actor.remote("run"))] = actor

    async def _each(self, actors: Iterable[_Actor], do: Callable[[_Actor], Awaitable[Any]]) -> None:
        """`do` for all at once; the first failure is raised, deaths before others."""
        results = await asyncio.gather(*(do(actor) for actor in actors), return_exceptions=True)
        errors = [r for r in results if isinstance(r, BaseException)]
        if errors:
            raise next((e for e in errors if isinstance(e, Died)), errors[0])

    async def _within_start(self, what: str, work: Awaitable[T]) -> T:
        seconds = self._config.cluster.start_seconds
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            raise RunFailed(
                "start", f"{what} took longer than cluster.start_seconds = {seconds:g}: look into {self._run.logs} or raise it."
            ) from None

    # --- course -------------------------------------------------------------------------------------------------------

    async def _course(self) -> int:
        learners = [task for task, actor in self._ends.items() if actor.spec.role == "learner"]
        learned = asyncio.gather(*learners, return_exceptions=True)
        controller = Controller(self._config, self._run, self._actors["scheduler-0"].peer, learned, only_eval=self._only_eval)
        course = asyncio.create_task(controller.run())
        silence = asyncio.create_task(self._watch_silence())
        interrupt = asyncio.create_task(self._interrupted.wait())
        try:
            await self._until_end(course, silence, interrupt)
            if interrupt.done() and not course.done():
                self._report.stopping()
                await self._interrupt(course, learned)
                return 130
            facts = await self._facts()
            controller.finish(facts)
            return 0
        except RunFailed as failure:
            await controller.stop(failure.sentence)
            raise
        finally:
            for task in (course, silence, interrupt):
                task.cancel()

    async def _until_end(self, course: asyncio.Task[Any], silence: asyncio.Task[Any], interrupt: asyncio.Task[Any]) -> None:
        """Until the course is over or interrupted; raises the first cause when a part fails."""
        while True:
            await asyncio.wait([course, silence, interrupt, *self._ends], return_when=asyncio.FIRST_COMPLETED)
            ended = [(task, self._ends.pop(task)) for task in list(self._ends) if task.done()]
            failed = [(task, actor) for task, actor in ended if task.exception() is not None]
            for task, actor in failed:
                if not actor.fatal and isinstance(task.exception(), Died):
                    await self._restart_pool(actor)
            causes = [task.exception() for task, actor in failed if actor.fatal or not isinstance(task.exception(), Died)]
            if silence.done():
                causes.append(silence.exception())
            if course.done() and course.exception() is not None:
                causes.append(course.exception())
            if causes:
                raise await self._first_cause([c for c in causes if c is not None])
            if course.done() or interrupt.done():
                return

    async def _first_cause(self, causes: list[BaseException]) -> BaseException:
        if not any(isinstance(cause, Died) for cause in causes) and self._ends:
            await asyncio.wait(self._ends, timeout=DEATHS_SETTLE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            causes += [t.exception() for t in self._ends if t.done() and t.exception() is not None]  # type: ignore[misc]
        return next((cause for cause in causes if isinstance(cause, Died)), causes[0])

    async def _restart_pool(self, dead: _Actor) -> None:
        self._pool_restarts += 1
        if self._pool_restarts > MAX_POOL_RESTARTS:
            raise RunFailed(dead.name, f"{dead.name} died for the {self._pool_restarts}th time: see its log.")
        log.warning("%s died; starting it again (%d of %d)", dead.name, self._pool_restarts, MAX_POOL_RESTARTS)
        print(f"{dead.name} died; starting it again, its episodes go on from their snapshots.", flush=True)
        pool = self._create("envpool", dead.spec.rank, dead.spec.world, 0.0)
        await self._within_start(f"the restart of {dead.name}", self._bring_up(pool))

    async def _bring_up(self, pool: _Actor) -> None:
        await self._introduce(pool)
        await pool.remote("build")
        for other in self._actors.values():
            if other is not pool:
                await pool.remote("connect", other.name, other.handle)
        await pool.remote("start")
        for other in self._actors.values():
            if other is not pool:
                await other.remote("connect", pool.name, pool.handle)
        self._watch(pool)

    async def _watch_silence(self) -> None:
        """Raises when a role does not answer a ping: stopped or stuck, it would otherwise hang the run in silence."""
        seconds = self._config.cluster.silence_seconds

        async def ping(actor: _Actor) -> None:
            try:
                async with asyncio.timeout(seconds):
                    await actor.remote("pid")
            except TimeoutError:
                raise RunFailed(
                    actor.name, f"{actor.name} has not answered for cluster.silence_seconds = {seconds:g}: see its log."
                ) from None
            except Died:
                pass  # the end of its `run` tells

        while True:
            await self._each(list(self._actors.values()), ping)
            await asyncio.sleep(seconds / 3)

    async def _interrupt(self, course: asyncio.Task[Any], learned: asyncio.Future[Any]) -> None:
        """Ctrl-C: the learner ends its step and writes a checkpoint."""
        course.cancel()
        await self._each((a for a in self._actors.values() if a.spec.role == "learner"), lambda actor: actor.remote("stop"))
        await learned

    async def _facts(self) -> dict[str, Facts]:
        facts: dict[str, Facts] = {}
        for actor in self._actors.values():
            with contextlib.suppress(PeerError):
                facts[actor.name] = await ask(actor.peer, GET_FACTS, GetFacts(), timeout=10.0)
        return facts

    async def _stop(self) -> None:
        """Stop all roles, nodes before pools and the scheduler last; those that are dead or do not answer are left to Ray."""
        for roles in (("learner", "rollout"), ("envpool",), ("scheduler",)):
            group = [a for a in self._actors.values() if a.spec.role in roles]
            tasks = [asyncio.create_task(actor.remote("stop")) for actor in group]
            if tasks:
                await asyncio.wait(tasks, timeout=self._config.cluster.stop_seconds)
            for task in tasks:
                task.cancel()
        for end in self._ends:
            end.cancel()


def main() -> int:
    """`python -m segue.cluster.driver RUN MODEL ATTEMPT [--resume CHECKPOINT] [--only-eval]`: started by the supervisor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("model")
    parser.add_argument("attempt", type=int)
    parser.add_argument("--resume", default="")
    parser.add_argument("--only-eval", action="store_true")
    arguments = parser.parse_args()
    report = Report()
    run = RunDir.open(arguments.run)
    with ProcessLog(run.logs, "driver", "0"):
        try:
            config = load_config(run.config)
            driver = Driver(run, config, arguments.model, arguments.resume, arguments.attempt, arguments.only_eval, report)
            code = asyncio.run(driver.run())
            report.result(code)
            return code
        except Exception as error:
            failure = failure_of(error, "driver")
            log.exception("the run ended")
            code = 2 if failure.fault == "user" else 1
            report.result(code, failure.error, failure.sentence)
            return code


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # Ray's and torch's exit handlers have nothing left to do, and may wait for threads that will not end
