"""The scheduler's core at 1,000, 10,000 and 100,000 live episodes: events per second, and what an event costs in operations.

    python -m benchmarks.scheduler_core [--json FILE] [--events 1500000] [--live 1000 10000 100000]

Whole lifecycles are replayed against the real core, single-threaded: groups are admitted, leased, sampled in deltas over several
turns, paused by weight updates, parked when their slice is used up, failed and retried, lost with their node, finished,
batched, taken, trained and committed. The model of nodes and learner makes blocks of events and carries out the commands outside
the measured time. An event is one delta, one change of an episode's state or one command; other messages (pauses, slices, …)
cost time here and count for nothing.

`operations` are counted by the core itself: one per table access, and the depth of the heap per push and pop. Per event they must
not grow faster than log n: from 1,000 to 100,000 episodes by no more than log(100,000) / log(1,000) = 1.67.
"""

from __future__ import annotations

import gc
import json
import math
import random
import sys
import time
from typing import Any

from benchmarks.command import Parser, ended, json_file, positive
from benchmarks.result import document, machine, write
from scheduler.core import SchedulerCore
from scheduler.core import commands as c
from scheduler.core import events as e
from segue.config import Config
from segue.config.root import resolve
from segue.episode import State, Task
from segue.ports.rollout import DeltaHead, Fail, Finish, Loaded, Parked, Paused, Resumed, SliceUsed
from segue.ports.transfer import Transfer, TransferResult

GROUP = 8
MAX_AGE = 4
PLACES = 512
BLOCK = 1000
BLOCK_SECONDS = 0.05
FAILURES = 0.002
"""Share of turns that end in a failed attempt."""
SLICE_TURNS = 4
BLOCKS_PER_NODE_DEATH = 100
BLOCKS_DEAD = 40
"""While a node is away its episodes wait, and younger ones whose slice is used up are parked for them."""


def make_config(live: int) -> Config:
    """So many batches ahead, and so many places, that about `live` episodes are live at any time."""
    groups = max(1, live // (GROUP * (MAX_AGE + 1)))
    return resolve(
        {
            "steps": 1_000_000,
            "task": {"env": "latency", "train_tasks": 1_000_000},
            "model": {"path": "none"},
            "group": {"size": GROUP},
            "batch": {"groups": groups},
            "staleness": {"max_age": MAX_AGE},
            "rollout": {"nodes": 1, "max_episodes": 1, "slice_tokens": 1000, "wall_seconds": 1e6},
            "scheduler": {"retries_env": 100, "retries_infra": 100, "lease_seconds": 1e6},
        },
        "benchmark",
    )


class Running:
    """One attempt as its node knows it."""

    __slots__ = ("attempt", "episode", "node", "parking", "reward", "seq", "turn", "turns")

    def __init__(self, grant: c.Grant, turns: int) -> None:
        self.episode = grant.episode
        self.attempt = grant.attempt
        self.node = grant.node
        self.seq = grant.next_seq
        self.turn = grant.turn
        self.turns = turns
        self.reward = 0.0
        self.parking = False


class Load:
    """The model around the core. `block` makes events; `carry_out` answers commands; `learn` moves the learner on."""

    def __init__(self, live: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.core = SchedulerCore(make_config(live))
        # Fewer places than live episodes: some wait for a lease, some for their group, some for their batch.
        places = int(live * 0.6)
        names = [f"rollout-{i}" for i in range(max(2, -(-places // PLACES)))]
        self.per_node = max(1, places // len(names))
        self.running: dict[int, Running] = {}
        self.order: list[Running] = []
        self.rewards: dict[int, float] = {}
        self.lengths: dict[int, int] = {}
        self.version = 0
        self.trained = 0
        self.tasks = 0
        self.sessions: dict[str, int] = {}
        self.transfers: list[tuple[Transfer, list[tuple[str, int]]]] = []
        self.formed: list[int] = []
        self.now = 0.0
        self.dead = ""
        for name in names:
            self.join(name)
        self.send(e.TrainingOpened(1_000_000))
        self.send(e.WeightsReady(0, "here"))
        for event in self.update():
            self.send(event)

    # --- outside the measured time ------------------------------------------------------------------------------------

    def send(self, event: e.Event) -> None:
        self.carry_out([self.core.handle(event, self.now)])

    def join(self, name: str) -> None:
        self.sessions[name] = self.sessions.get(name, 0) + 1
        self.send(e.NodeJoined(name, self.sessions[name], self.per_node, self.per_node))

    def carry_out(self, outs: list[Any]) -> None:
        for out in outs:
            for command in out:
                kind = type(command)
                if kind is c.Grant:
                    turns = self.lengths.setdefault(command.episode, self.random.randint(3, 12))
                    run = Running(command, turns)
                    run.reward = self.rewards.get(command.episode, 0.0)
                    self.running[command.episode] = run
                    self.order.append(run)
                elif kind is c.DropAttempt:
                    self.running.pop(command.episode, None)
                elif kind is c.ParkAttempt:
                    if command.episode in self.running:
                        self.running[command.episode].parking = True
                elif kind is c.Forget:
                    self.rewards.pop(command.episode, None)
                    self.lengths.pop(command.episode, None)
                elif kind is c.NeedTasks:
                    tasks = [Task(f"t{self.tasks + i}", "latency", i) for i in range(command.count)]
                    self.tasks += command.count
                    self.send(e.TasksArrived(tasks))
                elif kind is c.BeginTransfer:
                    self.transfers.append((command.transfer, command.nodes))
                elif kind is c.FormBatch:
                    self.formed.append(command.plan.step)
                elif kind is c.Fatal:
                    raise AssertionError(command)

    def update(self) -> list[e.Event]:
        """The events of finished transfers, an update's and joins': the sender's results, and every node's load."""
        events: list[e.Event] = []
        for transfer, nodes in self.transfers:
            self.version = max(self.version, transfer.version)
            events.append(TransferResult(transfer.version, transfer.transfer, True, [], "", 1, 0.1, 0.1))
            events += [e.FromNode(n, s, Loaded(transfer.transfer, transfer.version, 0.1, 0.0, 0.1)) for n, s in nodes]
        self.transfers = []
        return events

    def block(self) -> list[e.Event]:
        """The next `BLOCK` messages: a turn, or what else may happen, of attempts chosen at random."""
        events: list[e.Event] = []
        choose, order, running = self.random, self.order, self.running
        while len(events) < BLOCK and running:
            index = int(choose.random() * len(order))
            run = order[index]
            if running.get(run.episode) is not run:
                order[index] = order[-1]
                order.pop()
                continue
            self.turn(run, events)
        return events

    def turn(self, run: Running, events: list[e.Event]) -> None:
        key = run.episode, run.attempt
        if run.parking:
            del self.running[run.episode]
            events.append(Parked(*key, run.seq, 1.0))
            return
        if run.turn < 0 and run.seq == 0:
            events.append(DeltaHead(*key, 0, -1, (), True, False, 0.0))
            run.seq = 1
        if self.random.random() < FAILURES:
            del self.running[run.episode]
            events.append(Fail(*key, "infra" if self.random.random() < 0.5 else "env", "crash"))
            return
        run.turn += 1
        reward = self.random.random()
        events.append(DeltaHead(*key, run.seq, run.turn, ((self.version, 40),), False, True))
        events.append(DeltaHead(*key, run.seq + 1, run.turn, (), True, False, reward))
        run.seq += 2
        run.reward += reward
        self.rewards[run.episode] = run.reward
        if run.turn + 1 >= run.turns:
            del self.running[run.episode]
            events.append(Finish(*key, run.seq, "terminated", run.turn + 1, run.reward, 0, 5.0))
        elif (run.turn + 1) % SLICE_TURNS == 0:
            events.append(SliceUsed(*key))

    def learn(self) -> list[e.Event]:
        """What the learner does when a batch is there: all of one step, with an update that pauses a fifth of the attempts."""
        if not self.formed or self.transfers:
            return []
        step = self.formed.pop(0)
        self.trained = step + 1
        events: list[e.Event] = [e.BatchTaken(step), e.BatchTrained(step)]
        if self.trained % 10 == 0:
            events.append(e.BatchesCommitted(self.trained))
        events.append(e.WeightsReady(self.trained, "here"))
        for index, run in enumerate(self.running.values()):
            if index % 5 == 0:
                events += [Paused(run.episode, run.attempt, "update"), Resumed(run.episode, run.attempt)]
        return events

    def death(self) -> list[e.Event]:
        """One node dies with everything it ran."""
        name = self.random.choice(list(self.sessions))
        for run in [run for run in self.running.values() if run.node == name]:
            del self.running[run.episode]
        self.dead = name
        return [e.NodeLost(name, self.sessions[name], "killed")]

    def rebirth(self) -> list[e.Event]:
        """The dead node comes back."""
        name, self.dead = self.dead, ""
        if not name:
            return []
        self.sessions[name] += 1
        return [e.NodeJoined(name, self.sessions[name], self.per_node, self.per_node)]

    @property
    def live(self) -> int:
        counts = self.core.tables.episodes.counts
        over = (State.TRAINED, State.DROPPED, State.FAILED)
        return sum(count for state, count in counts.items() if state not in over)


class Measured:
    """Sums over measured blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self.deltas = 0
        self.changes = 0
        self.commands = 0
        self.operations = 0
        self.live: list[int] = []
        self.seen: dict[str, int] = {}

    @property
    def events(self) -> int:
        return self.deltas + self.changes + self.commands


def play(load: Load, events: list[e.Event], into: Measured | None) -> None:
    """Hand a block in, and then carry out what came of it."""
    core = load.core
    handle = core.handle
    outs: list[Any] = []
    keep = outs.append
    changes, operations = core.tables.episodes.transitions, core.operations
    cpu, begin = time.process_time(), time.perf_counter()
    now = load.now
    for event in events:
        out = handle(event, now)
        if out:
            keep(out)
    keep(core.tick(now))
    core.next_deadline()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    if into is not None:
        into.seconds += seconds
        into.cpu_seconds += cpu_seconds
        into.deltas += sum(type(event) is DeltaHead for event in events)
        into.changes += core.tables.episodes.transitions - changes
        into.commands += sum(map(len, outs))
        into.operations += core.operations - operations
    load.carry_out(outs)


def measure(live: int, events: int, seed: int) -> Measured:
    """Warm up for two batches, then measure whole blocks until `events` have been counted."""
    load, measured, blocks = Load(live, seed), Measured(), 0
    while load.trained < 2 or measured.events < events:
        into = measured if load.trained >= 2 else None
        blocks += 1
        play(load, load.block(), into)
        play(load, load.learn(), into)
        play(load, load.update(), into)
        if blocks % BLOCKS_PER_NODE_DEATH == 0:
            play(load, load.death(), into)
        if blocks % BLOCKS_PER_NODE_DEATH == BLOCKS_DEAD:
            play(load, load.rebirth(), into)
        load.core.tables.observations.clear()
        load.now += BLOCK_SECONDS
        if into is not None:
            measured.live.append(load.live)
    load.core.tables.episodes.check()
    tally = load.core.tables.tally
    measured.seen = {
        "batches_trained": load.trained,
        "parked": tally["parked",],
        "retries": sum(tally.under("retries").values()),
        "migrated": sum(tally.under("migrated").values()),
        "nodes_lost": tally["fenced", "silent"],
        "updates": int(load.core.updates.figures["updates"]),
        "refused": sum(tally.under("refused").values()),
    }
    return measured


def figures(measured: Measured) -> dict[str, Any]:
    """One size's numbers, plain."""
    return {
        "live_episodes_mean": round(sum(measured.live) / len(measured.live)),
        "events": measured.events,
        "deltas": measured.deltas,
        "state_changes": measured.changes,
        "commands": measured.commands,
        "events_per_second": round(measured.events / measured.seconds),
        "events_per_cpu_second": round(measured.events / measured.cpu_seconds),
        "operations_per_event": round(measured.operations / measured.events, 3),
        "seen": measured.seen,
    }


def main() -> None:
    parser = Parser("scheduler-core", __doc__)
    parser.add_argument("--json", type=json_file)
    parser.add_argument("--events", type=positive, default=1_500_000, help="events to measure at each size")
    parser.add_argument("--live", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if min(arguments.live) < 2:
        parser.error("--live must be 2 or more: growth is compared with that of log n")
    where = machine()
    sizes = {}
    for live in arguments.live:
        gc.collect()
        sizes[live] = figures(measure(live, arguments.events, arguments.seed))
        print(f"{live:>7} live: {json.dumps(sizes[live])}", flush=True)
    first, last = min(sizes), max(sizes)
    growth = sizes[last]["operations_per_event"] / sizes[first]["operations_per_event"]
    limit = math.log(last) / math.log(first)
    print(f"operations per event grow by {growth:.3f} from {first} to {last} live episodes (log n: {limit:.3f})")
    print(f"{sizes[last]['events_per_second']} events per second at {last} live episodes")
    result = {
        "events_per_second": sizes[last]["events_per_second"],
        "operations_growth_1k_to_100k": round(growth, 4),
        "log_growth": round(limit, 4),
        "sizes": {str(live): numbers for live, numbers in sizes.items()},
    }
    told = {key: value for key, value in vars(arguments).items() if key != "json"}
    write(
        arguments.json,
        document("scheduler_core", result, seeds=[arguments.seed], arguments=told, packages=("msgspec",), where=where),
    )


if __name__ == "__main__":
    sys.exit(ended(main))
