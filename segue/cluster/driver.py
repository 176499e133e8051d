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
from collections.abc import Collection
from typing import Any

from segue.cluster.child import Job, run_job, tell_failure
from segue.cluster.controller import Controller
from segue.cluster.cores import pin
from segue.cluster.crew import Crew
from segue.cluster.hosts.plan import read_hosts
from segue.cluster.placement import Placement
from segue.cluster.processes import block_sigterm
from segue.cluster.ray_cluster import ray_of
from segue.cluster.recovery import Recovery, worth_another
from segue.cluster.role_handle import Died, RoleHandle, first_cause
from segue.cluster.roles import GET_FACTS, Facts, GetFacts
from segue.cluster.starting import Start, for_each
from segue.errors import RunFailed, UserError
from segue.ports.rpc import PeerError, RemoteError, ask

log = logging.getLogger("segue.cluster.driver")  # run as __main__

COUNTED_SECONDS = 2.0
"""How long a step's line waits for what the roles have counted; it is written without those that do not answer."""


class Driver:
    """One run on Ray. `run` returns the exit code."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._run = job.run
        self._config = job.config
        self._report = job.report
        self._crew = Crew(job)
        self._recovery = Recovery(job.config, job.run, self._crew)
        self._silent: set[str] = set()
        self._interrupted = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted.set)
        pin(os.getpid(), self._config.cluster.cores, "cluster.cores")  # Ray, and the roles that name none, inherit them
        began, crew = loop.time(), self._crew
        if plan := read_hosts(self._run):
            crew.placement = Placement(self._config, plan)
        crew.say(f"starting the roles on the Ray at {plan.ray}" if plan and plan.ray else "starting Ray and the roles")
        cluster = ray_of(self._config, self._job.scratch, plan)
        log.info("Ray runs after %.1f s", loop.time() - began)
        try:
            for pid, part in cluster.processes():
                self._report.process(pid, part, fatal=True)
            if crew.placement is not None:
                self._report.ray(cluster.address)
                await crew.placement.gathered(self._config.cluster.start_seconds)
                crew.say(f"all {len(plan.hosts) if plan else 1} hosts are nodes of Ray after {loop.time() - began:.1f} s")
            start = Start("The start of the roles", self._config.cluster.start_seconds, self._run.logs, crew.say)
            try:
                await start.within(self._start(start))
            except Died as death:
                raise (crew.placement and await crew.placement.lost_with(death.part)) or death from None
            self._report.started()
            crew.say(f"all {len(crew.actors)} roles run after {loop.time() - began:.1f} s")
            code = await self._course()
            self._report.result(code)
        except Exception as error:
            code = tell_failure(error, "driver", self._report)
        finally:
            self._report.stopping()
            await self._stop()
            cluster.stop()
        return code

    # --- start --------------------------------------------------------------------------------------------------------

    async def _start(self, start: Start) -> None:
        config, crew = self._config, self._crew
        for role, count in (  # those that take longest to build come first
            ("learner", config.learner.ranks),
            ("rollout", config.rollout.nodes),
            ("scheduler", 1),
            ("envpool", config.envpool.pools),
        ):
            for rank in range(count):
                actor = crew.create(role, rank)
                crew.actors[actor.name] = actor
        actors = crew.actors.values()
        await start.stage(actors, crew.find_pid, "the roles have processes")
        ranks = crew.of("learner")
        meet = await self._meeting(ranks[0]) if len(ranks) > 1 else ""
        await start.stage(actors, lambda actor: actor.remote("build", meet), "the roles are built")
        for actor in actors:
            for other in actors:
                if actor is not other:
                    await actor.remote("connect", other.name, other.handle)
        for roles in (("scheduler",), ("envpool",), ("rollout", "learner")):
            await start.stage(crew.of(*roles), lambda actor: actor.remote("start"), f"{' and '.join(roles)} started")
        for actor in actors:
            crew.watch(actor)

    async def _meeting(self, first: RoleHandle) -> str:
        """Where the learner ranks meet: at rank 0."""
        host = first.spec.address or self._config.cluster.interface
        return f"{host}:{await first.remote('free_port', 'the learner ranks')}"

    # --- course -------------------------------------------------------------------------------------------------------

    async def _course(self) -> int:
        learners = [task for task, actor in self._crew.ends.items() if actor.spec.role == "learner"]
        learned = asyncio.gather(*learners, return_exceptions=True)
        scheduler, console = self._crew.actors["scheduler-0"].peer, self._job.console
        only_eval = self._job.only_eval
        controller = Controller(self._config, self._run, scheduler, learned, console, self._counted, only_eval=only_eval)
        course = asyncio.create_task(controller.run())
        silence = asyncio.create_task(self._watch_silence())
        beating = asyncio.create_task(self._beat())
        interrupt = asyncio.create_task(self._interrupted.wait())
        self._recovery.welcome()
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
            controller.finish(facts, silent=[name for name in self._crew.actors if name not in facts])
            await controller.stop("the run is done")
            return 0
        except (RunFailed, UserError) as failure:
            if "scheduler-0" not in self._silent:
                await _end(course)
                await controller.catch_up()
            await controller.stop(str(failure))
            raise
        finally:
            self._recovery.cancel()
            for task in (course, silence, beating, interrupt):
                task.cancel()

    async def _until_end(self, course: asyncio.Task[Any], silence: asyncio.Task[Any], interrupt: asyncio.Task[Any]) -> None:
        """Until the course is over or interrupted; raises the first cause when a part fails."""
        while True:
            waiting = {course, silence, interrupt, *self._recovery.tasks, *self._crew.ends}
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failed = []
            for task in done - {interrupt}:
                actor = self._crew.ends.pop(task, None)
                self._recovery.tasks.discard(task)
                if task.cancelled():  # the end of a silent one is not waited for
                    continue
                error = task.exception()
                if actor is not None and not actor.fatal and (reason := worth_another(error, actor)):
                    self._recovery.replace(actor, reason)
                elif error is not None:
                    failed.append(task)
            if failed:
                raise await first_cause(failed, self._crew.ends)
            if course.done() or interrupt.done():
                return

    async def _watch_silence(self) -> None:
        """Raises when a role does not answer a ping: stopped or stuck, it would otherwise hang the run in silence."""
        seconds = self._config.cluster.silence_seconds

        async def ping(actor: RoleHandle) -> None:
            try:
                async with asyncio.timeout(seconds):
                    await actor.remote("pid")
            except TimeoutError:
                if not actor.fatal:
                    self._crew.say(f"{actor.name} has not answered for cluster.silence_seconds = {seconds:g}: it is ended.")
                    return self._end_silent(actor)
                self._silent.add(actor.name)
                raise RunFailed(
                    actor.name, f"{actor.name} has not answered for cluster.silence_seconds = {seconds:g}: see {actor.spec.log}."
                ) from None
            except Died:
                pass  # the end of its `run` tells

        while True:
            await for_each([actor for actor in self._crew.actors.values() if not self._recovery.away(actor.name)], ping)
            await asyncio.sleep(seconds / 3)

    def _end_silent(self, actor: RoleHandle) -> None:
        """A node or pool that is stuck or out of reach: its `run` will tell of no death, so this does."""
        if self._crew.actors.get(actor.name) is not actor or self._recovery.away(actor.name):
            return  # another process has its place already
        for task in [task for task, other in self._crew.ends.items() if other is actor]:
            del self._crew.ends[task]
            task.cancel()
        self._recovery.replace(actor, "silent")

    async def _beat(self) -> None:
        """The supervisor watches this process as it watches the roles."""
        while True:
            self._report.alive()
            await asyncio.sleep(self._config.cluster.silence_seconds / 3)

    async def _interrupt(self, course: asyncio.Task[Any], learned: asyncio.Future[Any]) -> None:
        """Ctrl-C: the learner ends its step and writes a checkpoint. Raises what it could not do."""
        await _end(course)
        await for_each(self._crew.of("learner"), lambda actor: actor.remote("stop"))
        errors = [end for end in await learned if isinstance(end, BaseException)]
        if errors:
            raise next((error for error in errors if isinstance(error, Died)), errors[0])

    def _present(self) -> list[RoleHandle]:
        """Those that can be expected to answer."""
        return [a for a in self._crew.actors.values() if not self._recovery.away(a.name) and a.name not in self._silent]

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
        for end in self._crew.ends:
            end.cancel()


async def _end(course: asyncio.Task[Any]) -> None:
    """Cancel the course and wait until it is over; its own failure, if it has one, is known already."""
    course.cancel()
    await asyncio.wait([course])


def main() -> int:
    """`python -m segue.cluster.driver`: started by the supervisor, which hears SIGTERM for the whole run."""
    block_sigterm()  # before the first thread; Ray's processes inherit it
    return run_job("driver", lambda job: asyncio.run(Driver(job).run()))


if __name__ == "__main__":
    status = main()
    os._exit(status)  # Ray's and torch's exit handlers have nothing left to do, and may wait for threads that will not end
