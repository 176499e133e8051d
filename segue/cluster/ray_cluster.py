"""Ray for one run: started for it and ended with it, or there before and after; and the processes it consists of."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import psutil
import ray

from segue.cluster.hosts.member import HOST_RESOURCE
from segue.cluster.hosts.plan import Plan
from segue.cluster.processes import end_family
from segue.config import Config
from segue.errors import RunFailed

log = logging.getLogger(__name__)

_LATE = "timed out during startup"
"""In what Ray says where its node process was not known to its control store after 30 s, as on a machine with much else to do."""
_NAMES = {"gcs_server": "Ray's control store (gcs_server)", "raylet": "Ray's node process (raylet)"}


class RayCluster:
    """A local Ray, whose files are in `folder`: a short path, because a socket's path may not be long. Its maker removes it."""

    def __init__(self, config: Config, folder: Path, resources: dict[str, float] | None = None) -> None:
        for last in (False, True):
            try:
                # "local", because RAY_ADDRESS or a Ray that is already running here must not catch this run.
                ray.init(
                    address="local",
                    num_cpus=0,
                    resources=resources,
                    include_dashboard=False,
                    object_store_memory=config.cluster.object_store_bytes,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address=config.cluster.interface,
                    _temp_dir=str(folder),
                )
                return
            except Exception as error:  # Ray's start-up raises whatever went wrong below it
                what = " ".join(str(error).split())
                if last or _LATE not in what:
                    raise RunFailed(
                        "ray", f"Ray did not start ({what}): look at memory, disk and ports of this machine."
                    ) from error
            log.warning("Ray did not start in the 30 s that it gives itself; trying once more")
            ray.shutdown()
            end_family(grace_seconds=0.0)  # nothing but that Ray runs below this process yet

    def processes(self) -> list[tuple[int, str]]:
        """(pid, what it is) of the parts without which Ray does not go on."""
        children = psutil.Process().children(recursive=True)
        return [(p.pid, _NAMES[p.name()]) for p in children if p.name() in _NAMES]

    @property
    def address(self) -> str:
        """Where other hosts join it."""
        return str(ray.get_runtime_context().gcs_address)

    def stop(self) -> None:
        """End Ray. Its processes hear no SIGTERM (`segue.cluster.processes.block_sigterm`), by which Ray would ask each of
        them to end and wait a second: they are killed, once this process has taken leave of them."""
        if (node := ray._private.worker._global_node) is not None:
            kill = node.kill_all_processes
            node.kill_all_processes = lambda **_: kill(check_alive=False, allow_graceful=False)
        ray.shutdown()
        end_family(grace_seconds=0.0)


class AttachedRay:
    """A Ray that was there before the run, at `address`, and goes on after it.

    This process is a driver of it, and no more: Ray ends the actors and placement groups of a driver that leaves or dies.
    """

    def __init__(self, address: str) -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            what = " ".join(str(error).split())
            raise RunFailed("ray", f"The Ray at {address} is out of reach ({what}): look at its head.") from error
        self.address = address

    def processes(self) -> list[tuple[int, str]]:
        """As `RayCluster.processes`, as far as they are on this machine: this node's, and the control store."""
        context = ray.get_runtime_context()
        marks = {"raylet": f"--node_id={context.get_node_id()}", "gcs_server": f"--session-name={context.get_session_name()}"}
        running = psutil.process_iter(["name", "cmdline"])
        return [(p.pid, _NAMES[p.info["name"]]) for p in running if marks.get(p.info["name"], "?") in (p.info["cmdline"] or ())]

    def stop(self) -> None:
        """Leave it."""
        ray.shutdown()


def ray_of(config: Config, folder: Path, plan: Plan | None) -> RayCluster | AttachedRay:
    """The Ray of a run: started for it, or the one its plan names."""
    if plan is not None and plan.ray:
        return AttachedRay(plan.ray)
    return RayCluster(config, folder, {HOST_RESOURCE.format(0): 1.0} if plan is not None else None)


def create_actor(kind: type, arguments: tuple[Any, ...], gpus: float, placed: dict[str, Any] | None = None) -> Any:
    """An actor of our own, never restarted by Ray: what a death means is our decision (`segue.cluster.driver`).

    `placed` are Ray's options that say where. It inherits the environment of Ray's node process, OMP_NUM_THREADS included (a
    `runtime_env` would start Python twice per actor).
    """
    options = {"num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 1000}
    return ray.remote(**options, **(placed or {}))(kind).remote(*arguments)
