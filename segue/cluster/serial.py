"""Serial mode: the whole loop in one process, on one event loop with a logical clock, with the same classes.

Peers are function calls, weights are copied in memory, environments run inline, and heavy work takes the logical seconds of
`[serial]`. Nothing depends on real time, so two runs give equal metrics.jsonl but for seconds: the first debugging tool.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
import sys
from pathlib import Path

from segue.clock import LogicalLoop
from segue.cluster.actor import failure_of
from segue.cluster.controller import Controller
from segue.cluster.peers import LocalPeer
from segue.cluster.roles import Facts, RoleSpec
from segue.cluster.supervisor import Report
from segue.cluster.wiring import Host, Place, build_host
from segue.config import Config, load_config, to_toml
from segue.errors import RunFailed
from segue.logs import ProcessLog
from segue.rundir import RunDir

log = logging.getLogger(__name__)

STOP_ORDER = (("learner", "rollout"), ("envpool",), ("scheduler",))


class Serial:
    """One serial run. `run` returns the exit code."""

    def __init__(self, run: RunDir, config: Config, model: str, resume: str, attempt: int, only_eval: bool) -> None:
        self._run = run
        self._config = config
        self._model = model
        self._resume = resume
        self._attempt = attempt
        self._only_eval = only_eval
        self._hosts: dict[str, Host] = {}
        self._interrupted = False

    async def run(self) -> int:
        signal.signal(signal.SIGINT, self._on_interrupt)
        await self._build()
        try:
            return await self._course()
        finally:
            await self._stop()

    def _on_interrupt(self, number: int, frame: object) -> None:
        """Noticed by the course at the next step: this loop has no thread to be woken from."""
        self._interrupted = True

    async def _build(self) -> None:
        from weightsync.local import LocalHub

        config = self._config
        place = Place(asyncio.get_running_loop().time, LocalHub(), self._attempt)
        counts = (("scheduler", 1), ("envpool", config.envpool.pools), ("rollout", config.rollout.nodes), ("learner", 1))
        for role, count in counts:
            for rank in range(count):
                text = to_toml(config)
                spec = RoleSpec(role, rank, count, str(self._run.path), text, self._model, resume=self._resume)
                self._hosts[spec.name] = await build_host(spec, place)
        for host in self._hosts.values():
            for name, other in self._hosts.items():
                if other is not host:
                    host.role.connect(name, LocalPeer(name, other.role))
        for host in self._hosts.values():
            await host.start()

    async def _course(self) -> int:
        runs = {name: asyncio.create_task(host.role.run(), name=name) for name, host in self._hosts.items()}
        scheduler = LocalPeer("scheduler-0", self._hosts["scheduler-0"].role)
        learned = asyncio.shield(runs["learner-0"])
        controller = Controller(self._config, self._run, scheduler, learned, self._say, only_eval=self._only_eval)
        course = asyncio.create_task(controller.run())
        waiting: set[asyncio.Task[None]] = {course, *runs.values()}
        try:
            while not course.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {course}:
                    task.result()
            await course
            if self._interrupted:
                return 130
            controller.finish(self._facts())
            return 0
        except RunFailed as failure:
            await controller.stop(failure.sentence)
            raise
        finally:
            for task in (course, *runs.values()):
                task.cancel()

    def _say(self, line: str) -> None:
        print(line, flush=True)
        if self._interrupted:
            asyncio.get_running_loop().create_task(self._hosts["learner-0"].role.stop())

    def _facts(self) -> dict[str, Facts]:
        return {name: host.facts() for name, host in self._hosts.items()}

    async def _stop(self) -> None:
        for roles in STOP_ORDER:
            for host in self._hosts.values():
                if host.spec.role in roles:
                    await host.stop()


def main() -> int:
    """`python -m segue.cluster.serial RUN MODEL ATTEMPT [--resume CHECKPOINT] [--only-eval]`: started by the supervisor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("model")
    parser.add_argument("attempt", type=int)
    parser.add_argument("--resume", default="")
    parser.add_argument("--only-eval", action="store_true")
    arguments = parser.parse_args()
    report = Report()
    run = RunDir.open(arguments.run)
    with ProcessLog(run.logs, "serial", "0"):
        try:
            config = load_config(run.config)
            import torch

            torch.set_num_threads(1)
            random.seed(config.seed)
            with asyncio.Runner(loop_factory=LogicalLoop) as runner:
                serial = Serial(run, config, arguments.model, arguments.resume, arguments.attempt, arguments.only_eval)
                code = runner.run(serial.run())
            report.result(code)
            return code
        except Exception as error:
            failure = failure_of(error, "serial")
            log.exception("the run ended")
            code = 2 if failure.fault == "user" else 1
            report.result(code, failure.error, failure.sentence)
            return code


if __name__ == "__main__":
    sys.exit(main())
