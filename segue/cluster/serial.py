"""Serial mode: the whole loop in one process, on one event loop with a logical clock, with the same classes.

Peers are function calls, weights are copied in memory, environments run inline, and heavy work takes the logical seconds of
`[serial]`. Nothing depends on real time, so two runs give equal metrics.jsonl but for seconds: the first debugging tool.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Awaitable, Collection
from typing import Any

from segue.clock import LogicalLoop
from segue.cluster.child import Job, run_job, tell_failure
from segue.cluster.controller import Controller
from segue.cluster.peers import LocalPeer
from segue.cluster.processes import survive_sigterm
from segue.cluster.roles import Facts, RoleSpec
from segue.cluster.wiring import Host, Place, build_host
from segue.config import to_toml
from segue.errors import RunFailed, UserError

STOP_ORDER = (("learner", "rollout"), ("envpool",), ("scheduler",))


class Serial:
    """One serial run. `run` returns the exit code."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._run = job.run
        self._config = job.config
        self._hosts: dict[str, Host] = {}
        self._interrupted = asyncio.Event()

    async def run(self) -> int:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupted.set)
        try:
            await self._build()
            self._job.report.started()
            code = await self._course()
            self._job.report.result(code)
        except Exception as error:
            code = tell_failure(error, "serial", self._job.report)
        finally:
            await self._stop()
        return code

    async def _build(self) -> None:
        from weightsync.local import LocalHub

        config = self._config
        place = Place(asyncio.get_running_loop().time, LocalHub(), self._job.attempt)
        counts = (("scheduler", 1), ("envpool", config.envpool.pools), ("rollout", config.rollout.nodes), ("learner", 1))
        for role, count in counts:
            for rank in range(count):
                text = to_toml(config)
                spec = RoleSpec(role, rank, count, str(self._run.path), text, self._job.model, resume=self._job.resume)
                self._hosts[spec.name] = await build_host(spec, place)
        for host in self._hosts.values():
            for name, other in self._hosts.items():
                if other is not host:
                    host.role.connect(name, LocalPeer(name, other.role))
        for host in self._hosts.values():
            await host.start()

    async def _course(self) -> int:
        runs = {name: asyncio.create_task(host.run(), name=name) for name, host in self._hosts.items()}
        scheduler = LocalPeer("scheduler-0", self._hosts["scheduler-0"].role)
        learned = asyncio.shield(runs["learner-0"])
        job, config = self._job, self._config
        controller = Controller(
            config, self._run, scheduler, learned, job.console, self._counted, only_eval=job.only_eval, serial=True
        )
        course = asyncio.create_task(controller.run())
        interrupt = asyncio.create_task(self._interrupted.wait())
        waiting: set[asyncio.Task[Any]] = {course, interrupt, *runs.values()}
        try:
            while not course.done() and not interrupt.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {course}:
                    task.result()
            if not course.done():
                try:
                    await self._interrupt(course, learned)
                finally:
                    await controller.catch_up()
                return 130
            await course
            controller.finish(self._facts())
            await controller.stop("the run is done")
            return 0
        except (RunFailed, UserError) as failure:
            course.cancel()
            await asyncio.wait([course])
            await controller.catch_up()
            await controller.stop(str(failure))
            raise
        finally:
            for task in (course, interrupt, *runs.values()):
                task.cancel()

    async def _interrupt(self, course: asyncio.Task[None], learned: Awaitable[None]) -> None:
        """Ctrl-C: the learner ends its step and writes a checkpoint."""
        course.cancel()
        await asyncio.wait([course])
        await self._hosts["learner-0"].role.stop()
        await learned

    def _facts(self) -> dict[str, Facts]:
        return {name: host.facts() for name, host in self._hosts.items()}

    async def _counted(self, names: Collection[str]) -> dict[str, Facts]:
        return {name: host.facts(names) for name, host in self._hosts.items()}

    async def _stop(self) -> None:
        for roles in STOP_ORDER:
            for host in self._hosts.values():
                if host.spec.role in roles:
                    await host.stop()


def _run(job: Job) -> int:
    import torch

    torch.set_num_threads(1)
    random.seed(job.config.seed)
    with asyncio.Runner(loop_factory=LogicalLoop) as runner:
        return runner.run(Serial(job).run())


def main() -> int:
    """`python -m segue.cluster.serial`: started by the supervisor, which hears SIGTERM for it."""
    survive_sigterm()
    return run_job("serial", _run)


if __name__ == "__main__":
    sys.exit(main())
