"""How the course of a run ends when something in it fails: the first cause comes through, and the learner's end stays seen."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from segue.cluster import driver as drivers
from segue.cluster.child import Job, Report
from segue.cluster.controller import Controller
from segue.cluster.driver import Driver
from segue.cluster.role_handle import Died
from segue.cluster.roles import Facts
from segue.cluster.serial import Serial
from segue.config import Config, to_toml
from segue.config.root import resolve
from segue.console import Console
from segue.errors import RunFailed
from segue.files import JsonLines, read_jsonl
from segue.ports.driver import (
    GET_STATUS,
    OPEN_TRAINING,
    START_EVAL,
    WATCH_EVENTS,
    EventsReply,
    OpenTraining,
    RunEvent,
    Status,
    WatchEvents,
)
from segue.ports.rpc import Done, Service
from segue.rundir import RunDir

SECONDS = 30.0
"""Until a course that does not end fails its test."""


class Scheduler(Service):
    """Opens training, and then tells its events."""

    name = "scheduler-0"

    def __init__(self, *events: RunEvent) -> None:
        super().__init__()
        self.events = list(events)
        self._opened = asyncio.Event()
        self._more = asyncio.Event()
        self.all_told = asyncio.Event()
        self.add(OPEN_TRAINING, self._open)
        self.add(WATCH_EVENTS, self._watch)

    async def _open(self, request: OpenTraining) -> Done:
        self._opened.set()
        return Done()

    async def _watch(self, request: WatchEvents) -> EventsReply:
        await self._opened.wait()
        if request.wait and not self._after(request):
            self.all_told.set()
            await self._more.wait()
        return EventsReply(self._after(request))

    def _after(self, request: WatchEvents) -> list[RunEvent]:
        return [event for event in self.events if event.number > request.after]

    async def call(self, method: str, body: bytes, timeout: float) -> bytes:
        return await self.handle(method, body)


async def no_counts(names: Collection[str]) -> dict[str, Facts]:
    """Roles that do not say what they counted."""
    return {}


@pytest.fixture
def config() -> Config:
    return resolve({"steps": 1, "task": {"env": "latency"}, "model": {"path": "x"}, "eval": {"tasks": 0}}, "a test")


@pytest.fixture
def run(tmp_path: Path, config: Config) -> RunDir:
    run = RunDir.create(tmp_path / "run", to_toml(config))
    run.begin_attempt(datetime(2026, 1, 1))
    return run


async def test_a_fatal_event_ends_the_course_and_cancels_nothing_else(config: Config, run: RunDir) -> None:
    """The driver looks at the learner's end in the same moment: a cancelled one would hide the cause."""
    scheduler = Scheduler(RunEvent(1, "fatal", {"part": "weightsync", "sentence": "No node took the weights."}))
    learner = asyncio.get_running_loop().create_future()
    learned = asyncio.gather(learner, return_exceptions=True)
    controller = Controller(config, run, scheduler, learned, Console(), no_counts)
    with pytest.raises(RunFailed, match="No node took the weights"):
        await asyncio.wait_for(controller.run(), SECONDS)
    assert not learner.cancelled() and not learned.done()
    learner.set_result(None)
    await learned


async def test_a_learner_that_fails_ends_the_course_without_an_evaluation(config: Config, run: RunDir) -> None:
    """It would evaluate what was not trained, and print a result before the failure."""
    scheduler = Scheduler(RunEvent(1, "warning", {"sentence": "Nothing."}))
    asked: list[str] = []
    handle = scheduler.handle

    async def noted(method: str, body: bytes) -> bytes:
        asked.append(method)
        if len(asked) > 2:
            await asyncio.Event().wait()
        return await handle(method, body)

    scheduler.handle = noted  # type: ignore[method-assign]
    evaluated = config.model_copy(update={"eval": config.eval.model_copy(update={"tasks": 4, "before": False})})
    learner = asyncio.get_running_loop().create_future()
    learner.set_exception(RunFailed("learner-0", "No batch came."))
    controller = Controller(evaluated, run, scheduler, asyncio.gather(learner, return_exceptions=True), Console(), no_counts)
    with pytest.raises(RunFailed, match="No batch came"):
        await asyncio.wait_for(controller.run(), SECONDS)
    assert START_EVAL.name not in asked


@pytest.mark.parametrize("serial", [False, True])
async def test_the_first_cause_is_logged_and_reported_before_anything_is_stopped(
    config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, serial: bool
) -> None:
    """Where roles or Ray do not stop in time, this process is killed, and nobody else knows it."""
    order: list[Any] = []
    failing = AsyncMock(side_effect=RunFailed("learner-0", "It broke."))
    stopped = AsyncMock(side_effect=lambda *_: order.append("It broke." in caplog.text))
    monkeypatch.setattr(drivers, "ray_of", lambda *_: Mock(processes=list))
    monkeypatch.setattr(Driver, "_start", failing)
    monkeypatch.setattr(Serial, "_build", failing)
    for kind in (Driver, Serial):
        monkeypatch.setattr(kind, "_stop", stopped)
    report = Mock(spec=Report, result=lambda *what: order.append(what))
    job = Job(run, config, "x", 1, "", False, report, Console(), run.path)
    assert await (Serial(job).run() if serial else Driver(job).run()) == 1
    assert order == [(1, "learner-0", "It broke."), True]


@pytest.mark.parametrize(
    ("ends", "sentence"),
    [
        ([RunFailed("learner", "The checkpoint of step 3 could not be written.")], "could not be written"),
        ([RunFailed("learner", "It was left alone."), Died(RunFailed("learner-1", "learner-1 died."))], "learner-1 died"),
    ],
)
async def test_an_interrupt_whose_checkpoint_fails_says_so(
    config: Config, run: RunDir, tmp_path: Path, ends: list[Any], sentence: str
) -> None:
    """Exit code 130 without a word would say that the checkpoint is there."""
    driver = Driver(Job(run, config, "x", 1, "", False, Report(), Console(), tmp_path))
    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in ends]
    for future, end in zip(futures, ends, strict=True):
        future.set_exception(end)
    course = asyncio.create_task(asyncio.sleep(0))
    with pytest.raises(RunFailed, match=sentence):
        await driver._interrupt(course, asyncio.gather(*futures, return_exceptions=True))
    futures[0] = loop.create_future()
    futures[0].set_result(None)
    await driver._interrupt(course, asyncio.gather(futures[0], return_exceptions=True))


async def test_a_serial_run_says_which_seconds_are_logical(config: Config, run: RunDir) -> None:
    learned = asyncio.get_running_loop().create_future()
    notes = [
        Controller(config, run, Scheduler(), learned, Console(), no_counts, serial=serial)._notes([]) for serial in (True, False)
    ]
    assert ["logical clock" in " ".join(found) for found in notes] == [True, False]


async def test_steps_that_an_attempt_took_with_it_are_missed(config: Config, run: RunDir) -> None:
    """A driver that is killed between a checkpoint and the line of its step."""
    learned = asyncio.get_running_loop().create_future()
    controller = Controller(config, run, Scheduler(), learned, Console(), no_counts)
    assert controller._notes([]) == []
    with JsonLines(run.metrics) as lines:
        for step in (0, 1, 4):
            lines.append({"step": step})
    (note,) = controller._notes([])
    assert note.startswith("metrics.jsonl lacks 2 steps (the first is 2)")


def step_event(number: int, step: int) -> RunEvent:
    counts = {"newest_version": step, "queue": {"ready": 0}, "episodes": {"states": {"leased": 0}}}
    counts["reprefill"] = {"tokens": 9 * step, "seconds": 0.5 * step, "updates": step, "coalesced": 0, "inflight": "keep"}
    counts["redundant"] = {"episodes": 2 * step, "tokens": 30 * step}
    return RunEvent(number, "step", {"step": step, "stats": {}, "ages": [1], "scheduler": counts})


@pytest.mark.parametrize("end", [None, RunFailed("learner", "The checkpoint could not be written.")])
async def test_the_step_that_an_interrupt_lets_end_is_noted(
    config: Config, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: RunFailed | None
) -> None:
    """It is in the checkpoint: a run that goes on from there would never report it again."""
    scheduler = Scheduler(step_event(1, 0))
    driver = Driver(Job(run, config, "x", 1, "", False, Report(), Console(), tmp_path))
    learner = asyncio.get_running_loop().create_future()

    async def learns() -> None:
        await learner

    async def stop(*_: Any) -> None:
        if not learner.done():
            scheduler.events.append(step_event(2, 1))
            learner.set_result(None) if end is None else learner.set_exception(end)

    monkeypatch.setattr(driver, "_watch_silence", asyncio.Event().wait)
    roles = {role: SimpleNamespace(name=f"{role}-0", spec=SimpleNamespace(role=role)) for role in ("scheduler", "learner")}
    roles["scheduler"].peer = roles["learner"].peer = scheduler
    roles["learner"].remote = stop
    driver._crew.actors = {actor.name: actor for actor in roles.values()}  # type: ignore[misc]
    driver._crew.ends = {asyncio.create_task(learns()): roles["learner"]}  # type: ignore[dict-item]
    course = asyncio.create_task(driver._course())
    await asyncio.wait_for(scheduler.all_told.wait(), SECONDS)
    driver._interrupted.set()
    if end is None:
        assert await asyncio.wait_for(course, SECONDS) == 130
    else:
        with pytest.raises(RunFailed, match="could not be written"):
            await asyncio.wait_for(course, SECONDS)
    lines = read_jsonl(run.metrics)
    assert [line["step"] for line in lines] == [0, 1]
    since_the_step_before = [(line["redundant_episodes"], line["redundant_tokens"]) for line in lines]
    assert since_the_step_before == [(0, 0), (2, 30)]


async def test_a_step_has_what_the_roles_counted_since_the_one_before(config: Config, run: RunDir) -> None:
    """A node that does not answer once is in the next line for both; one that began anew counts from 0."""
    asked: list[list[str]] = []
    prefilled = [{"0": 5, "1": 100}, {"0": 15, "1": 200}, {"0": 25}, {"0": 3, "1": 260}]

    async def counts(names: Collection[str]) -> Mapping[str, Facts]:
        told = prefilled[len(asked)]
        asked.append([*names])
        sample = 'segue_prefill_tokens_total{cause="turn"}'
        return {f"rollout-{rank}": Facts({f"rollout-{rank}": {sample: float(tokens)}}, {}, 1) for rank, tokens in told.items()}

    scheduler = Scheduler(*(step_event(step + 1, step) for step in range(3)))
    learned = asyncio.get_running_loop().create_future()
    controller = Controller(config, run, scheduler, learned, Console(), counts)
    course = asyncio.create_task(controller.run())
    await asyncio.wait_for(scheduler.all_told.wait(), SECONDS)
    course.cancel()
    await asyncio.wait([course])
    lines = read_jsonl(run.metrics)
    assert [line["prefill_tokens"]["turn"] for line in lines] == [110, 10, 63]
    assert all("segue_prefill_tokens_total" in names for names in asked) and len(asked) == 4
    assert [line["state_seconds"] for line in lines] == [None] * 3


@pytest.mark.parametrize(("serial", "waits"), [(False, [3.5, 1.0]), (True, [60.0, 1.0])])
async def test_a_steps_wait_is_within_the_step(config: Config, run: RunDir, serial: bool, waits: list[float]) -> None:
    """The learner has waited for its first batch since before the evaluation, which is no part of the first step."""
    learned = asyncio.get_running_loop().create_future()
    controller = Controller(config, run, Scheduler(), learned, Console(), no_counts, serial=serial)
    controller._last_step = 100.0  # training is opened
    lines = []
    for step, (now, waited) in enumerate([(105.0, 60.0), (107.0, 1.0)]):
        data = step_event(step + 1, step).data
        data["stats"] = {"forward_backward_seconds": 1.25, "optimizer_seconds": 0.25, "wait_seconds": waited}
        lines.append(controller._line(data, now, {}))
    assert [(line["step_seconds"], line["wait_seconds"]) for line in lines] == list(zip([5.0, 2.0], waits, strict=True))


async def test_who_is_cancelled_while_the_roles_are_asked_has_not_seen_the_step(config: Config, run: RunDir) -> None:
    """The driver of an interrupted run takes the events up again: the step must still be among them."""
    asking, asked = asyncio.Event(), 0

    async def counts(names: Collection[str]) -> Mapping[str, Facts]:
        nonlocal asked
        asked += 1
        if asked > 1:
            asking.set()
            await asyncio.Event().wait()
        return {}

    scheduler = Scheduler(step_event(1, 0))
    learned = asyncio.get_running_loop().create_future()
    controller = Controller(config, run, scheduler, learned, Console(), counts)
    course = asyncio.create_task(controller.run())
    await asyncio.wait_for(asking.wait(), SECONDS)
    course.cancel()
    await asyncio.wait([course])
    assert read_jsonl(run.metrics) == []
    await asyncio.wait_for(controller.catch_up(), SECONDS)
    (line,) = read_jsonl(run.metrics)
    assert line["step"] == 0 and "prefill_tokens" not in line


async def test_the_last_step_is_noted_once_though_the_learner_ends_while_the_roles_are_asked(config: Config, run: RunDir) -> None:
    """The course drains the events when the learner has ended: whoever followed them until then must have stopped."""
    asking, again, asked = asyncio.Event(), asyncio.Event(), 0

    async def counts(names: Collection[str]) -> Mapping[str, Facts]:
        nonlocal asked
        asked += 1
        if asked == 2:
            asking.set()
            await again.wait()
        elif asked == 3:
            again.set()
            await asyncio.sleep(0.05)
        return {}

    scheduler = Scheduler(step_event(1, 0))
    scheduler.add(GET_STATUS, AsyncMock(return_value=Status({})))
    learned = asyncio.get_running_loop().create_future()
    controller = Controller(config, run, scheduler, learned, Console(), counts)
    course = asyncio.create_task(controller.run())
    await asyncio.wait_for(asking.wait(), SECONDS)
    learned.set_result(())
    await asyncio.wait_for(course, SECONDS)
    assert [line["step"] for line in read_jsonl(run.metrics)] == [0]
