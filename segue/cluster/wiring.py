"""Builds the shell of each role with everything it is handed: engine, receiver, renderer, sender, metrics, clocks.

The one file that imports the roles. Heavy imports stand inside the builders: the scheduler and the env pools must not load torch,
and the driver none of it.
"""

from __future__ import annotations

import os
import platform
import time
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segue.build import git_sha
from segue.clock import Compute, LogicalCompute, ThreadCompute
from segue.cluster.cores import cores_of, key_of, pin
from segue.cluster.own_parts import own_engine
from segue.cluster.processes import unblock_sigterm
from segue.cluster.roles import Facts, Role, RoleSpec
from segue.config import Config
from segue.config.root import resolve
from segue.errors import UserError, WireError
from segue.logs import ProcessLog
from segue.metrics import ActivityClock, BuildInfo, Metrics, StateClock
from segue.metrics.exporter import Exporter
from segue.metrics.gpus import gpu_reader
from segue.metrics.heartbeat import Heartbeat, LoopMonitor
from segue.metrics.process import read_process, read_starts
from segue.metrics.states import Clock
from segue.metrics.vocabulary import ROLLOUT_PRECEDENCE, STATES
from segue.rundir import SCHEDULER_CUT, RunDir
from segue.stacks import StackSampler

if TYPE_CHECKING:
    from segue.ports.engine import Engine
    from weightsync.local import LocalHub

POLICY = "policy"
SESSIONS_PER_PROCESS = 1_000_000
"""More than a node's process will ever begin: the sessions of the next process come after all of its."""


@dataclass
class Place:
    """Where a role runs. `hub` is set in serial mode: everything shares one loop, whose clock is logical."""

    now: Callable[[], float]
    hub: LocalHub | None = None
    attempt: int = 1

    @property
    def serial(self) -> bool:
        return self.hub is not None

    def compute(self, name: str) -> Compute:
        return LogicalCompute() if self.serial else ThreadCompute(name)


@dataclass
class Host:
    """A built role, and what shows it to the world: metrics by target name and, where it has a process, exporters and log."""

    spec: RoleSpec
    config: Config
    role: Role
    metrics: dict[str, Metrics]
    clocks: dict[str, Clock] = field(default_factory=dict)
    computes: list[Compute] = field(default_factory=list)
    monitor: LoopMonitor | None = None
    exporters: list[Exporter] = field(default_factory=list)
    log: ProcessLog | None = None
    stacks: StackSampler | None = None

    async def start(self) -> None:
        """Start the role: vLLM with it, which takes a minute."""
        if self.monitor is not None:
            self.monitor.start()
        for target, clock in self.clocks.items():
            self.metrics[target].attach(clock)
        await self.role.start()

    async def run(self) -> None:
        """The role's work, once all roles have started. State clocks begin anew: setting up is neither work nor idleness."""
        for target, clock in self.clocks.items():
            self.metrics[target].attach(clock)
        if self.stacks is not None:
            self.stacks.section("run")
        await self.role.run()

    async def stop(self) -> None:
        """Stop the role, then withdraw its targets: a clean exit leaves none behind."""
        try:
            await self.role.stop()
        finally:
            if self.monitor is not None:
                self.monitor.stop()
            for exporter in self.exporters:
                exporter.close()
            for compute in self.computes:
                compute.close()
            if self.stacks is not None:
                self.stacks.close()
            if self.log is not None:
                self.log.close()

    def facts(self, names: Collection[str] = ()) -> Facts:
        """Metric samples (of `names` alone, if there are any) and seconds per state, for every target of this process."""
        metrics = {target: registry.snapshot(names) for target, registry in self.metrics.items()}
        states = {target: registry.clock.seconds() for target, registry in self.metrics.items() if registry.clock is not None}
        return Facts(metrics, states, os.getpid())


def config_of(spec: RoleSpec) -> Config:
    """The resolved config a spec carries, with the address of the host it is for."""
    config = resolve(tomllib.loads(spec.config), "the run's config.toml")
    if not spec.address:
        return config
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"interface": spec.address})})


async def build_host(spec: RoleSpec, place: Place | None = None) -> Host:
    """Build one role. Without a `place` it is alone in its process: it gets a log file, metrics ports and a loop monitor."""
    alone = place is None
    place = place or Place(time.monotonic, attempt=spec.attempt)  # no loop's: scrapes read state clocks from other threads
    config = config_of(spec)
    if alone:
        pin(os.getpid(), cores_of(config, spec.role, spec.rank), key_of(config, spec.role))
    stacks = None
    if alone and config.cluster.sample_stacks:
        stacks = StackSampler(RunDir(Path(spec.run_dir)).stacks_of(spec.name), "start")
    host = _BUILDERS[spec.role](spec, config, place)
    host.stacks = stacks
    if alone:
        _expose(host)
    return host


def _expose(host: Host) -> None:
    """Log file, `/metrics` and `/health` of a role process."""
    spec, config = host.spec, host.config
    run = RunDir(Path(spec.run_dir))
    registry = next(iter(host.metrics.values()))
    host.log = ProcessLog(spec.log, spec.name, metrics=registry)
    registry.attach_reader(read_process)
    registry.attach_reader(lambda: read_starts(spec.start, spec.restarts))
    if reader := gpu_reader(registry.gpus):
        registry.attach_reader(reader)
    heartbeats = []
    for metrics in host.metrics.values():
        heartbeat = Heartbeat(metrics)
        heartbeats.append(heartbeat)
        host.exporters.append(
            Exporter(
                metrics,
                heartbeat,
                targets=run.targets,
                run=run.name,
                node=platform.node(),
                interface=config.cluster.interface,
                ports=config.cluster.ports,
                stale_after=config.cluster.silence_seconds,
            )
        )
    host.monitor = LoopMonitor(registry, tuple(heartbeats))


def _metrics(spec: RoleSpec, config: Config, place: Place, role: str = "", rank: str = "", gpus: tuple[str, ...] = ()) -> Metrics:
    return Metrics(
        role or spec.role,
        rank or str(spec.rank),
        envs=(config.task.env,),
        gpus=gpus,
        build=BuildInfo(git_sha=git_sha(), attempt=place.attempt),
        staleness_bound=config.staleness.max_age,
        monotonic=place.now,
    )


def _sync_metrics(spec: RoleSpec, config: Config, place: Place) -> Metrics:
    """Metrics of weight sync inside another role's process: target weightsync-<role>-<rank>."""
    return _metrics(spec, config, place, "weightsync", spec.name)


# --- scheduler --------------------------------------------------------------------------------------------------------


def _build_scheduler(spec: RoleSpec, config: Config, place: Place) -> Host:
    from envpool.suites import load_suite
    from scheduler.shell import SchedulerShell
    from segue.ports.journal import MemoryJournal

    tasks = load_suite(config.task.env, config.task.args).tasks("train", config.task.train_tasks, config.seed)
    metrics = _metrics(spec, config, place)
    clock = StateClock(STATES["scheduler"], place.now)
    compute = place.compute("scheduler-io")
    shell = SchedulerShell(config, Path(spec.run_dir), tasks, metrics, clock, MemoryJournal(), compute)
    if spec.resume:
        try:
            shell.restore((Path(spec.resume) / SCHEDULER_CUT).read_bytes())
        except (OSError, WireError):
            raise UserError(
                f"The checkpoint {spec.resume} is damaged ({SCHEDULER_CUT} is not what was written): "
                "remove that folder to resume from an earlier one, or start the run anew."
            ) from None
    return Host(spec, config, shell, {spec.name: metrics}, {spec.name: clock})


# --- env pool ---------------------------------------------------------------------------------------------------------


def _build_envpool(spec: RoleSpec, config: Config, place: Place) -> Host:
    from envpool.inprocess import InProcessWorkers
    from envpool.shell import PoolShell

    metrics = _metrics(spec, config, place)
    workers = InProcessWorkers.of(config) if place.serial else None
    return Host(spec, config, PoolShell(config, spec.name, metrics, workers), {spec.name: metrics})


# --- rollout node -----------------------------------------------------------------------------------------------------


def _build_rollout(spec: RoleSpec, config: Config, place: Place) -> Host:
    import torch

    from rollout.chat import ChatRenderer
    from rollout.embedded.support import open_tokenizer
    from rollout.node import NodeShell

    if not place.serial:
        torch.set_num_threads(config.rollout.threads)
    device = _device(config.rollout.gpus)
    metrics = _metrics(spec, config, place, gpus=_uuids(config.rollout.gpus))
    activity = ActivityClock(ROLLOUT_PRECEDENCE, place.now)
    sync = f"weightsync-{spec.name}"
    sync_metrics = _sync_metrics(spec, config, place)
    sync_clock = StateClock(STATES["weightsync"], place.now)
    compute = place.compute("engine")
    tokenizer = open_tokenizer(spec.model_path)
    if tokenizer is None:
        raise UserError(f"The model folder {spec.model_path} has no tokenizer: add its tokenizer files.")
    engine = _engine(spec, config, device, compute, tokenizer)
    receiver = _receiver(spec, config, place, sync_metrics, device, engine)
    shell = NodeShell(
        config,
        spec.name,
        engine,
        receiver,
        ChatRenderer(tokenizer),
        metrics=metrics,
        sync_metrics=sync_metrics,
        activity=activity,
        sync_clock=sync_clock,
        host=config.cluster.interface,
        session=1 + (spec.start - 1) * SESSIONS_PER_PROCESS,
    )
    targets = {spec.name: metrics, sync: sync_metrics}
    return Host(spec, config, shell, targets, {spec.name: activity, sync: sync_clock}, [compute])


def _engine(spec: RoleSpec, config: Config, device: str, compute: Compute, tokenizer: Any) -> Engine:
    rollout = config.rollout
    if rollout.engine == "vllm":
        from rollout.vllm.build import build_engine

        return build_engine(
            spec.model_path,
            slots=rollout.slots,
            max_tokens=rollout.max_tokens,
            score_tokens=max(2, config.weightsync.probe_tokens),
            dtype=rollout.dtype,
            device=device,
            seed=config.seed,
            threads=rollout.threads,
            tokenizer=tokenizer,
            engine_args=rollout.engine_args,
            worker_extension="segue.cluster.vllm_worker.Extension",
            start_seconds=0.9 * config.cluster.start_seconds,  # it knows what it lacks: it should speak before the driver
            staged=config.weightsync.staging != "none",
        )
    if rollout.own_engine:
        unblock_sigterm()  # what it starts it may end by SIGTERM
        return own_engine(config, node=spec.name, model_path=spec.model_path, device=device, compute=compute, tokenizer=tokenizer)
    from rollout.embedded import EmbeddedEngine
    from rollout.embedded.settings import settings

    return EmbeddedEngine(spec.model_path, device=device, compute=compute, tokenizer=tokenizer, **settings(config))


def _expected(path: str, config: Config) -> dict[str, Any]:
    """The named tensors of the engine's model, on the meta device."""
    from rollout.embedded import support
    from rollout.model_config import meta_model
    from rollout.vllm import expected

    max_tokens, dtype = config.rollout.max_tokens, config.rollout.dtype
    if config.rollout.engine == "vllm":
        return dict(meta_model(expected.open_config(path, max_tokens), dtype).state_dict())
    return support.meta_tensors(support.open_config(path, max_tokens), dtype)


def _receiver(spec: RoleSpec, config: Config, place: Place, metrics: Metrics, device: str, engine: Any) -> Any:
    from weightsync.local import LocalReceiver
    from weightsync.manifest import layout
    from weightsync.receiver import TorchReceiver
    from weightsync.workers import WorkersReceiver

    expected = layout(_expected(spec.model_path, config))
    if place.hub is not None:
        return LocalReceiver(place.hub, spec.name, metrics, model_name=POLICY, expected=expected)
    backend = config.weightsync.backend
    staging = config.weightsync.staging
    if config.rollout.engine == "vllm":  # its workers are processes of their own, which receive for themselves
        return WorkersReceiver(
            spec.name,
            engine.connect_workers,
            metrics,
            ranks=config.rollout.ranks,
            backend=backend,
            staging=staging,
            model_name=POLICY,
            expected=expected,
        )
    return TorchReceiver(
        spec.name,
        backend,
        device if backend == "nccl" else "cpu",
        metrics,
        model_name=POLICY,
        expected=expected,
        engine_device=device,
        staging=staging,
    )


def _device(gpus: float) -> str:
    import torch

    return f"cuda:{torch.cuda.current_device()}" if gpus > 0 and torch.cuda.is_available() else "cpu"


def _uuids(gpus: float) -> tuple[str, ...]:
    """The UUIDs of this process's GPUs (all that Ray lets it see) as the driver and DCGM write them; nothing on CPUs."""
    import torch

    if _device(gpus) == "cpu":
        return ()
    return tuple(f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in range(torch.cuda.device_count()))


# --- learner ----------------------------------------------------------------------------------------------------------


def _build_learner(spec: RoleSpec, config: Config, place: Place) -> Host:
    from learner.shell import LearnerShell
    from weightsync.gauges import PRECEDENCE

    metrics = _metrics(spec, config, place, gpus=_uuids(config.learner.gpus))
    clock = StateClock(STATES["learner"], place.now)
    sync = f"weightsync-{spec.name}"
    sync_metrics = _sync_metrics(spec, config, place)
    sync_clock = ActivityClock(PRECEDENCE, place.now)
    targets = {spec.name: metrics, sync: sync_metrics}
    clocks: dict[str, Clock] = {spec.name: clock, sync: sync_clock}
    sender = _sender(spec, config, place, sync_metrics, sync_clock)
    shell = LearnerShell(
        config,
        Path(spec.run_dir),
        spec.rank,
        spec.world,
        spec.model_path,
        sender,
        metrics,
        clock,
        Path(spec.resume) if spec.resume else None,
        rendezvous=spec.rendezvous,
        compute=place.compute("learner") if place.serial else None,
        prefetch=not place.serial,
    )
    return Host(spec, config, shell, targets, clocks)


def _sender(spec: RoleSpec, config: Config, place: Place, metrics: Metrics, clock: ActivityClock) -> Any:
    """What a learner rank sends weights with: rank 0 is the sender, every other one a further source."""
    import torch

    from weightsync.local import LocalSender
    from weightsync.sender import TorchSender
    from weightsync.source import TorchSource

    sync, dtype = config.weightsync, getattr(torch, config.rollout.dtype)
    if place.hub is not None:
        compute = LogicalCompute()
        seconds = config.serial.transfer_seconds
        return LocalSender(place.hub, POLICY, sync.bucket_bytes, seconds, compute, metrics, clock, dtype=dtype)
    host, ports = config.cluster.interface, config.cluster.ports
    options: dict[str, Any] = {
        "sources": tuple(f"learner-{rank}" for rank in range(spec.world)),
        "dtype": dtype,
        "device": _device(config.learner.gpus) if sync.backend == "nccl" else "cpu",
    }
    if spec.rank > 0:
        return TorchSource(POLICY, sync.backend, sync.bucket_bytes, host, metrics, clock, number=spec.rank, **options)
    return TorchSender(POLICY, sync.backend, sync.bucket_bytes, host, ports, metrics, clock, **options)


_BUILDERS: dict[str, Callable[[RoleSpec, Config, Place], Host]] = {
    "scheduler": _build_scheduler,
    "envpool": _build_envpool,
    "rollout": _build_rollout,
    "learner": _build_learner,
}
