"""How the course of a run ends when something in it fails: the first cause comes through, and the learner's end stays seen."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from segue.cluster.child import Job, Report
from segue.cluster.controller import Controller
from segue.cluster.driver import Died, Driver
from segue.config import Config, to_toml
from segue.config.root import resolve
from segue.console import Console
from segue.errors import RunFailed
from segue.ports.rpc import Done, Service
from segue.ports.scheduler import OPEN_TRAINING, WATCH_EVENTS, EventsReply, OpenTraining, RunEvent, WatchEvents
from segue.rundir import RunDir


class Scheduler(Service):
    """Opens training, and then has one event to tell."""

    name = "scheduler-0"

    def __init__(self, event: RunEvent) -> None:
        super().__init__()
        self._event = event
        self._opened = asyncio.Event()
        self.add(OPEN_TRAINING, self._open)
        self.add(WATCH_EVENTS, self._watch)

    async def _open(self, request: OpenTraining) -> Done:
        self._opened.set()
        return Done()

    async def _watch(self, request: WatchEvents) -> EventsReply:
        await self._opened.wait()
        return EventsReply([self._event])

    async def call(self, method: str, body: bytes, timeout: float) -> bytes:
        return await self.handle(method, body)


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
    controller = Controller(config, run, scheduler, learned, Console())
    with pytest.raises(RunFailed, match="No node took the weights"):
        await controller.run()
    assert not learner.cancelled() and not learned.done()
    learner.set_result(None)
    await learned


@pytest.mark.parametrize(
    ("ends", "sentence"),
    [
        ([RunFailed("learner", "The checkpoint of step 3 could not be written.")], "could not be written"),
        ([RunFailed("learner", "It was left alone."), Died(RunFailed("learner-1", "learner-1 died."))], "learner-1 died"),
    ],
)
async def test_an_interrupt_whose_checkpoint_fails_says_so(
    config: Config, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[Any], sentence: str
) -> None:
    """Exit code 130 without a word would say that the checkpoint is there."""
    driver = Driver(Job(run, config, "x", 1, "", False, Report(), Console(), tmp_path))
    monkeypatch.setattr(driver, "_each", lambda *_: asyncio.sleep(0))  # no learner to tell
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
