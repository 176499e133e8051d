"""An env pool without processes: stored replies, snapshots, replays that are compared; told to be slow or to fail, it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgpack

from segue.episode import Task, observation_hash
from segue.ports.envpool import (
    ENV_DELIVER,
    ENV_SUBMIT,
    RESET_STEP,
    Accepted,
    ChatMessage,
    Close,
    Create,
    Created,
    EnvDeliver,
    EnvFailed,
    EnvReply,
    EnvSubmit,
    Observation,
    Resume,
    Step,
    Stepped,
    StepResult,
)
from segue.ports.rpc import Done, Peer, Service, ask


class Talk:
    """A conversation partner: answers each action with its hash, ends after `turns` turns. Its history is its whole state."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.history: list[str] = []

    def reset(self) -> Observation:
        question = ChatMessage("user", f"Where is the lamp? {self.task.seed % 100}")
        return Observation(
            [ChatMessage("system", "You are a careful assistant."), question], stop=self.task.payload.get("stop", [])
        )

    def step(self, action: str) -> StepResult:
        self.history.append(action)
        turn = len(self.history)
        number = observation_hash([*self.history, self.task.id]) % 100
        words = self.task.payload.get("reply", "the {} lamp").format(number)
        done = turn >= self.task.payload.get("turns", 3)
        reward = self.task.payload.get("reward", number / 100 if done else 0.0)
        return StepResult(
            Observation([ChatMessage("tool", words)]), reward, done, False, {"success": float(done), "turns": float(turn)}
        )


class FakePool:
    """One env pool: instances by (episode, attempt), stored replies, snapshots every `snapshot_every` turns."""

    def __init__(
        self, name: str = "envpool-0", latency: float = 0.05, snapshot_every: int = 1, resume: Resume = Resume.SNAPSHOT
    ) -> None:
        self.name, self.latency, self.resume = name, latency, resume
        self.snapshot_every = snapshot_every if resume is Resume.SNAPSHOT else 0
        self.make: Callable[[Task], Talk] = Talk
        self.service = Service()
        self.service.add(ENV_SUBMIT, self._submit)
        self.nodes: dict[str, Peer] = {}
        self.instances: dict[tuple[int, int], Talk] = {}
        self.replies: dict[tuple[int, int, int], EnvReply] = {}
        self.steps: list[tuple[int, int, int]] = []
        self.accepted: list[tuple[int, int, int]] = []
        self.submits: list[EnvSubmit] = []
        self.slow: Callable[[int, int, int], float] = lambda episode, attempt, step: 0.0
        self.fail: Callable[[int, int, int], EnvFailed | None] = lambda episode, attempt, step: None
        self.tasks: set[asyncio.Task[None]] = set()

    async def _submit(self, submit: EnvSubmit) -> Done:
        self.submits.append(submit)
        for request in submit.requests:
            key = (request.episode, request.attempt)
            if isinstance(request, Accepted):
                self.accepted.append((*key, request.step))
            elif isinstance(request, Close):
                self.instances.pop(key, None)
            else:
                step = request.step if isinstance(request, Step) else RESET_STEP
                if (*key, step) not in self.replies:
                    self.replies[(*key, step)] = self._perform(request, step)
                self._answer(submit, (*key, step))
        return Done()

    def _perform(self, request: Create | Step, step: int) -> EnvReply:
        key = (request.episode, request.attempt)
        failed = self.fail(*key, step)
        if failed is not None:
            self.instances.pop(key, None)
            return failed
        if isinstance(request, Create):
            return self._create(request)
        talk = self.instances.get(key)
        if talk is None:
            return EnvFailed(*key, step, "infra", "unknown_instance", "no such instance")
        self.steps.append((*key, step))
        assert len(talk.history) == step, "steps in order"
        return Stepped(*key, step, talk.step(request.action), self._snapshot(talk), 0.0)

    def _create(self, request: Create) -> EnvReply:
        key = (request.episode, request.attempt)
        talk = self.instances[key] = self.make(request.task)
        observation = talk.reset()
        if request.restore is not None:
            if self.resume is Resume.PINNED and request.restore.replay:
                return EnvFailed(*key, RESET_STEP, "infra", "not_resumable", "it is pinned")
            if request.restore.snapshot is not None:
                talk.history = [str(a) for a in msgpack.unpackb(request.restore.snapshot)]
                assert len(talk.history) == request.restore.snapshot_turn + 1
            for record in request.restore.replay:
                observation = talk.step(record.action).observation
                if observation_hash(m.content for m in observation.messages) != record.observation_hash:
                    return EnvFailed(*key, RESET_STEP, "env", "replay_mismatch", "another observation")
            observation = Observation(observation.messages)  # only a reset says what completes an action
        return Created(*key, observation, self._snapshot(talk), 0.0, self.resume)

    def _snapshot(self, talk: Talk) -> bytes | None:
        every = self.snapshot_every
        packed: bytes = msgpack.packb(talk.history)
        return packed if every and len(talk.history) % every == 0 else None

    def _answer(self, submit: EnvSubmit, key: tuple[int, int, int]) -> None:
        task = asyncio.get_running_loop().create_task(self._deliver(submit.node, submit.session, key))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _deliver(self, node: str, session: int, key: tuple[int, int, int]) -> None:
        await asyncio.sleep(self.latency + self.slow(*key))
        await ask(self.nodes[node], ENV_DELIVER, EnvDeliver(self.name, session, [self.replies[key]]), 5.0)
