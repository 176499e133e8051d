"""Random requests, repetitions, deaths and delays against the pool's core: promises that hold under any interleaving."""

from __future__ import annotations

from typing import Any

from core_harness import Table
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from segue.episode import Task
from segue.ports.envpool import RESET_STEP, Accepted, Close, Create, Created, EnvFailed, Step, Stepped

EPISODES = st.integers(1, 4)
ACTIONS = st.sampled_from(["say", "say", "say", "raise", "end"])


class PoolMachine(RuleBasedStateMachine):
    """A node that keeps to the protocol, but repeats itself, changes its mind, and lives on a bad machine."""

    @initialize(workers=st.integers(1, 3), instances=st.integers(1, 2))
    def begin(self, workers: int, instances: int) -> None:
        self.table = Table(workers=workers, instances=instances, respawns_per_minute=1000)
        self.attempt: dict[int, int] = {}
        self.next_step: dict[int, int] = {}
        self.awaited: dict[int, int] = {}
        self.answers: dict[tuple[int, int, int], Any] = {}
        self.done: set[int] = set()
        self.session = 1

    def submit(self, *requests: Any) -> None:
        self.table.submit(*requests, session=self.session)
        self.read()

    def read(self) -> None:
        """Take replies as a node does: match them, or let them lie."""
        for _, session, reply in self.table.replies:
            if session != self.session:
                continue
            step = RESET_STEP if isinstance(reply, Created) else reply.step
            key = (reply.episode, reply.attempt, step)
            if isinstance(reply, EnvFailed):
                if reply.attempt == self.attempt.get(reply.episode) and self.awaited.get(reply.episode) == step:
                    self.ended(reply.episode)
                continue
            assert self.answers.setdefault(key, reply) == reply, "two different replies to one request"
            if isinstance(reply, Stepped):
                assert reply.result.reward == step + 1, "a step ran twice, or not at all"
            if reply.attempt == self.attempt[reply.episode] and self.awaited.get(reply.episode) == step:
                del self.awaited[reply.episode]
                self.next_step[reply.episode] = step + 1
                if isinstance(reply, Stepped) and reply.result.terminated:
                    self.done.add(reply.episode)
        self.table.replies.clear()

    def ended(self, episode: int) -> None:
        self.awaited.pop(episode, None)
        self.next_step.pop(episode, None)
        self.done.discard(episode)

    @rule(episode=EPISODES)
    def create(self, episode: int) -> None:
        """A new attempt; whatever the old one was doing."""
        self.ended(episode)
        self.attempt[episode] = self.attempt.get(episode, 0) + 1
        self.awaited[episode] = RESET_STEP
        self.submit(Create(episode, self.attempt[episode], Task(f"t{episode}", "faulty", episode), 0))

    @rule(episode=EPISODES, action=ACTIONS)
    def step(self, episode: int, action: str) -> None:
        if episode in self.next_step and episode not in self.awaited and episode not in self.done:
            self.awaited[episode] = self.next_step[episode]
            self.submit(Step(episode, self.attempt[episode], self.next_step[episode], action))

    @rule(episode=EPISODES)
    def repeat(self, episode: int) -> None:
        """The submit was not acknowledged in time: the same again."""
        if episode in self.awaited:
            step, attempt = self.awaited[episode], self.attempt[episode]
            task = Task(f"t{episode}", "faulty", episode)
            self.submit(Create(episode, attempt, task, 0) if step == RESET_STEP else Step(episode, attempt, step, "again"))

    @rule(episode=EPISODES, back=st.integers(1, 2))
    def stale(self, episode: int, back: int) -> None:
        attempt = self.attempt.get(episode, 0) - back
        if attempt >= 1:
            self.submit(Step(episode, attempt, 0, "stale"))

    @rule(episode=EPISODES)
    def accept(self, episode: int) -> None:
        if episode in self.next_step:
            self.submit(Accepted(episode, self.attempt[episode], self.next_step[episode] - 1))

    @rule(episode=EPISODES)
    def close(self, episode: int) -> None:
        if episode in self.attempt:
            self.submit(Close(episode, self.attempt[episode]))
            self.ended(episode)

    @rule()
    def new_session(self) -> None:
        self.session += 1
        for episode in self.attempt:
            self.ended(episode)
        self.submit()

    @precondition(lambda self: self.table.calls)
    @rule(which=st.integers(0, 20))
    def work(self, which: int) -> None:
        self.table.say(*self.table.calls.pop(which % len(self.table.calls)))
        self.read()

    @rule(which=st.integers(0, 2))
    def die(self, which: int) -> None:
        seat = which % self.table.limits.workers
        if self.table.pool._instances.seats.phase(seat) == "ready":
            self.table.lose(seat)
            self.read()

    @rule()
    def recover(self) -> None:
        self.table.gone()
        self.table.ready()
        self.read()

    @rule(seconds=st.sampled_from([0.1, 5.0, 10.0, 31.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.recover()  # a killed worker that stays for long is a fault of the machine's: see test_slots
        self.table.at(self.table.now + seconds, recover=True)
        self.read()

    @invariant()
    def waiters_have_deadlines(self) -> None:
        if getattr(self, "awaited", None) and self.table.pool.fault is None:
            assert self.table.pool.next_deadline() is not None

    def teardown(self) -> None:
        """Whatever happened: everyone who waits is answered, and every slot comes back."""
        if not hasattr(self, "table"):
            return
        for _ in range(100):
            self.recover()
            self.table.work()
            self.read()
            if not self.table.calls and not self.table.killed and not self.awaited:
                break
            self.table.at(self.table.now + 31.0, recover=True)
        assert not self.awaited, "someone waits for ever"
        for episode in list(self.attempt):
            self.close(episode)
        self.table.work()
        slots = self.table.pool.status()["slots"]
        assert slots["free"] == sum(slots.values()), slots
        seconds = sum(self.table.clock.seconds().values())
        assert abs(seconds - self.table.now * sum(slots.values())) < 1e-6


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
