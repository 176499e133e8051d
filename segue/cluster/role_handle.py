"""One role's actor as the driver sees it, and which of several failures came first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Any

import ray
import ray.exceptions

from segue import wire
from segue.cluster.actor import RoleActor
from segue.cluster.peers import RayPeer
from segue.cluster.ray_cluster import create_actor
from segue.cluster.roles import RoleSpec
from segue.cluster.supervisor import died
from segue.errors import RunFailed, UserError
from segue.ports.rpc import Failure

DEATHS_SETTLE_SECONDS = 1.0
"""A role may fail because another died; the news of the death may come a little later than the failure."""

log = logging.getLogger("segue.cluster.driver")


class RoleHandle:
    """A role process. `placed` are Ray's options that say where it goes; `here`: on the driver's host."""

    def __init__(self, spec: RoleSpec, gpus: float, placed: dict[str, Any] | None = None, here: bool = True) -> None:
        self.spec = spec
        self.name = spec.name
        self.here = here
        self.handle = create_actor(RoleActor, (wire.encode(spec),), gpus, placed)
        self.peer = RayPeer(self.name, self.handle)

    @property
    def fatal(self) -> bool:
        """Whether the run ends with this role. Env pools and rollout nodes are started anew; their episodes go on elsewhere
        meanwhile, or then, from what the scheduler holds of them."""
        return self.spec.role not in ("envpool", "rollout")

    async def remote(self, method: str, *arguments: Any) -> Any:
        """Call an actor method; a dead actor is `Died`, a `Failure` it returned a `RunFailed` or `UserError`."""
        try:
            reply = await asyncio.wrap_future(getattr(self.handle, method).remote(*arguments).future())
        except ray.exceptions.RayError as error:
            log.info("%s does not answer %s any more: %s", self.name, method, error)
            raise Died(died(self.name, self.spec.log)) from None
        if isinstance(reply, bytes):
            with contextlib.suppress(wire.UnknownMessage):
                failure = wire.decode(reply, Failure)
                if failure.fault == "user":
                    raise UserError(failure.sentence)
                raise (Broken if failure.fault == "internal" else RunFailed)(failure.error, failure.sentence)
        return reply

    def kill(self) -> None:
        """End the process, if there still is one: another is to take its place."""
        ray.kill(self.handle, no_restart=True)


class Died(RunFailed):
    """A role's process is gone: the first cause of whatever else fails in the same moments."""

    def __init__(self, failed: RunFailed) -> None:
        super().__init__(failed.part, failed.sentence)


class Broken(RunFailed):
    """A role met a mistake of ours: another process of it would too."""


async def first_cause(failed: Iterable[asyncio.Task[Any]], others: Iterable[asyncio.Task[Any]]) -> BaseException:
    """The death among the errors of `failed`, and of `others` if they fail within moments; without one, the first error."""
    errors = [error for task in failed if (error := task.exception()) is not None]
    pending = [task for task in others if not task.done()]
    if pending and not any(isinstance(error, Died) for error in errors):
        done, _ = await asyncio.wait(pending, timeout=DEATHS_SETTLE_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
        errors += [error for task in done if not task.cancelled() and (error := task.exception()) is not None]
    return next((error for error in errors if isinstance(error, Died)), errors[0])
