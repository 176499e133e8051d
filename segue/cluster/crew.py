"""The role processes of a run, as the driver holds them: made, placed, told to the supervisor, built, watched."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

from segue.cluster.child import Job
from segue.cluster.placement import Placement
from segue.cluster.role_handle import RoleHandle
from segue.cluster.roles import RoleSpec
from segue.config import to_toml

log = logging.getLogger("segue.cluster.driver")


class Crew:
    """`actors` are those that belong to the run, by name; `ends` their `run` calls under way; `placement` is there on several
    hosts."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._config = job.config
        self.actors: dict[str, RoleHandle] = {}
        self.ends: dict[asyncio.Task[Any], RoleHandle] = {}
        self.placement: Placement | None = None

    def of(self, *roles: str) -> list[RoleHandle]:
        return [actor for actor in self.actors.values() if actor.spec.role in roles]

    def create(self, role: str, rank: int, start: int = 1, restarts: Mapping[str, int] | None = None) -> RoleHandle:
        """Another process of a role, its `start`-th; `restarts` says how often each reason took one before it."""
        name, config, placement = f"{role}-{rank}", self._config, self.placement
        path = os.path.abspath if placement is not None else str  # processes on other hosts may begin in another folder
        worlds = {"learner": config.learner.ranks, "rollout": config.rollout.nodes, "envpool": config.envpool.pools}
        gpus = {"learner": config.learner.gpus, "rollout": config.rollout.gpus}.get(role, 0.0)
        spec = RoleSpec(
            role=role,
            rank=rank,
            world=worlds.get(role, 1),
            run_dir=path(self._job.run.path),
            config=to_toml(config),
            model_path=path(self._job.model),
            resume=path(self._job.resume) if self._job.resume else "",
            attempt=self._job.attempt,
            address=placement.address_of(name) if placement is not None else "",
            start=start,
            restarts=dict(restarts or {}),
        )
        if placement is None:
            return RoleHandle(spec, gpus)
        return RoleHandle(spec, gpus, placement.options(name), here=placement.host_of(name) == 0)

    async def find_pid(self, actor: RoleHandle) -> None:
        """Wait for its process."""
        pid = await actor.remote("pid")
        if actor.here:  # others are out of the supervisor's sight: Ray tells of their deaths
            self._job.report.process(pid, actor.name, fatal=actor.fatal)
        log.info("%s has process %d", actor.name, pid)

    def watch(self, actor: RoleHandle) -> None:
        self.ends[asyncio.create_task(actor.remote("run"))] = actor

    def say(self, line: str) -> None:
        print(line, file=self._job.console, flush=True)
