"""A suite for tests whose environments do what their action says, however bad: `task.env = "faulty_suite:build"`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from envpool.args import parse_args
from envpool.environment import DataError, Demonstration, Environment, Policy, Split, play
from segue.episode import Task
from segue.errors import UserError
from segue.ports.envpool import ChatMessage, Observation, StepResult


class FaultyArgs(msgspec.Struct, frozen=True):
    """`resume` is what instances declare; the rest are faults outside of steps, by phase."""

    resume: str = "snapshot"
    load: str = ""
    make: str = ""
    reset: str = ""
    close: str = ""


def misbehave(how: str) -> str:
    """Do it; returns what there is to observe, if one comes back."""
    word, _, rest = how.partition(" ")
    if word == "hang":
        time.sleep(1e6)
    elif word == "slow":
        time.sleep(float(rest))
    elif word == "spin":  # never lets go of the interpreter lock
        re.match(r"(a+)+b", "a" * 64)
    elif word == "exit":
        os._exit(int(rest))
    elif word == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "sysexit":
        sys.exit(3)
    elif word == "raise":
        raise RuntimeError(rest or "as asked")
    elif word == "data":
        raise DataError("as asked")
    elif word == "print":
        print("out", flush=True)
        print("err", file=sys.stderr, flush=True)
    elif word == "pid":
        return str(os.getpid())
    elif word == "child":  # in the same process group
        return str(subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL).pid)
    elif word == "fork":  # a plain fork: holds copies of all open files
        pid = os.fork()
        if pid == 0:
            time.sleep(1e6)
        return str(pid)
    elif word == "daemon":  # leaves the process group and the family
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(write, str(os.getpid()).encode())
                time.sleep(1e6)
            os._exit(0)
        os.wait()
        return os.read(read, 32).decode()
    elif word == "stdin":
        return repr(sys.stdin.read())
    elif word == "random":
        return str(random.random())
    elif word == "rubbish":  # writes into every socket it can find, the channel among them
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    os.write(int(name), b"\xff" * 1000)
    elif word == "asyncio":

        async def own_loop() -> str:
            await asyncio.sleep(0)
            return "ran"

        return asyncio.run(own_loop())
    return how


class Faulty:
    """Counts its steps; ends after "end". Notes the keys of its steps' effects in `keys`."""

    def __init__(self, args: FaultyArgs, keys: list[str]) -> None:
        self.resume: Any = args.resume
        self._args = args
        self._keys = keys
        self._said: list[str] = []
        misbehave(args.make)

    def reset(self, task: Task, seed: int) -> Observation:
        self._said = []
        return _observation(f"{task.id} {misbehave(self._args.reset)}")

    def step(self, action: str) -> StepResult:
        if action == "garbage":
            return "nothing of the kind"  # type: ignore[return-value]
        if action == "surrogate":
            return StepResult(_observation("\ud800"), 0.0, False, False)
        if action == "nan":
            return StepResult(_observation("x"), float("nan"), False, False)
        if action in ("scalars", "arrays"):
            import numpy as np

            share = np.float32(0.5) if action == "scalars" else np.zeros(2)
            return StepResult(_observation("x"), share, np.bool_(False), False, {"success": np.float64(1)})  # type: ignore[arg-type]
        if action == "both":
            return StepResult(_observation("x"), 0.0, True, True)
        if action == "nested":
            return StepResult(Observation(["no message"]), 0.0, False, False)  # type: ignore[list-item]
        said = misbehave(action)
        self._said.append(action)
        return StepResult(_observation(f"{len(self._said)}: {said}"), float(len(self._said)), action == "end", False)

    def take_key(self, key: str) -> None:
        self._keys.append(key)

    def snapshot(self) -> bytes:
        if self._said and self._said[-1].startswith("big "):
            return b"x" * int(self._said[-1].split()[1])
        return msgspec.msgpack.encode(self._said)

    def restore(self, snapshot: bytes) -> Observation:
        self._said = msgspec.msgpack.decode(snapshot, type=list[str])
        return _observation(f"{len(self._said)}: {self._said[-1] if self._said else ''}")

    def close(self) -> None:
        misbehave(self._args.close)


def _observation(text: str) -> Observation:
    return Observation([ChatMessage("user", text)])


class FaultySuite:
    """See the module."""

    name = "faulty"

    def __init__(self, args: FaultyArgs) -> None:
        self.args = args
        self.keys: list[str] = []

    def tasks(self, split: Split, n: int, seed: int) -> list[Task]:
        return [Task(f"{split} {seed} {i}", self.name, i) for i in range(n)]

    def make(self, task: Task, member: int, attempt: int = 1) -> Environment:
        return Faulty(self.args, self.keys)

    def oracle(self, task: Task) -> Policy:
        return lambda _: "end"

    def demonstrate(self, task: Task, rng: random.Random, good_share: float) -> Demonstration:
        return play(self.make(task, 0), task, self.oracle(task))

    def vocabulary(self) -> list[str]:
        return []

    def texts(self) -> Iterator[str]:
        return iter(())


def build(args: dict[str, Any]) -> FaultySuite:
    """The suite."""
    parsed = parse_args("faulty", args, FaultyArgs)
    if parsed.load == "user":
        raise UserError("The suite faulty does not want to: ask another.")
    misbehave(parsed.load)
    return FaultySuite(parsed)
