"""The course of a run, the same on Ray and in serial mode: evaluate, open training, follow the steps, evaluate, sum up.

Consumes: the scheduler's run events (long-polled), what the roles have counted, the end of the learner. Produces: console lines,
metrics.jsonl, summary.json. Waits for: each evaluation up to `eval.deadline_seconds`; every call up to its time-out; then the run
ends with that cause, unless it was only asked for counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import IO, Any, TypeVar, cast

from envpool.suites import load_suite
from segue.cluster.roles import Facts
from segue.config import Config
from segue.console import Console
from segue.errors import RunFailed, UserError
from segue.files import JsonLines, read_jsonl, write_json
from segue.metrics.samples import Scrape, difference
from segue.ports.driver import (
    EVAL_STATE,
    GET_STATUS,
    OPEN_TRAINING,
    START_EVAL,
    STOP_RUN,
    WATCH_EVENTS,
    EvalState,
    EvalStateReply,
    GetStatus,
    OpenTraining,
    RunEvent,
    StartEval,
    StopRun,
    WatchEvents,
)
from segue.ports.rpc import Peer, PeerLost, PeerTimeout, RemoteError, Rpc, ask
from segue.report import (
    EpisodeCounts,
    EvalResult,
    RunFacts,
    WeightSyncFigures,
    build_summary,
    print_summary,
    step_line,
    step_text,
)
from segue.report.counted import NAMES, counted
from segue.report.read import age_bound
from segue.rundir import RunDir
from segue.wire import Message

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

Counts = Callable[[Collection[str]], Awaitable[Mapping[str, Facts]]]
"""What the role processes have counted under these names, of those that answer at once."""

CALL_SECONDS = 30.0
WATCH_SECONDS = 10.0
"""How long the scheduler may hold a question for events before it says that there are none."""
LAST_EVENTS_SECONDS = 5.0
"""How long a run that ends early waits for what the scheduler has still to tell."""


class Controller:
    """See the module. `learned` is done when the learner has ended by itself; `console` is what the user sees; `counts` asks the
    roles at each step; in a `serial` run the roles' clocks are logical."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        scheduler: Peer,
        learned: Awaitable[Any],
        console: Console,
        counts: Counts,
        *,
        only_eval: bool = False,
        serial: bool = False,
    ) -> None:
        self._serial = serial
        self._config = config
        self._run = run
        self._scheduler = scheduler
        self._learned = learned
        self._console = console
        self._counts = counts
        self._only_eval = only_eval
        self._began = self._last_step = time.monotonic()
        self._first = True
        self._evals = _read_evals(run)
        earlier = read_jsonl(run.metrics)
        self._earlier_seconds = earlier[-1]["elapsed_seconds"] if earlier else 0.0
        self._eval_events: dict[str, asyncio.Event] = {}
        self._lines = JsonLines(run.metrics)
        self._seen = 0
        self._reprefill = (0, 0.0)  # tokens and seconds up to the last step
        self._redundant = (0, 0)  # episodes and tokens, likewise
        self._counted: Scrape = {}  # likewise, by the roles
        self._status: Mapping[str, Any] = {}

    async def run(self) -> None:
        """The whole course. Raises `RunFailed` or `UserError` where a part of it fails.

        The roles' own ends are the caller's to watch.
        """
        events = asyncio.create_task(self._follow())
        course = asyncio.create_task(self._course())
        try:
            await asyncio.wait([events, course], return_when=asyncio.FIRST_COMPLETED)
            if events.done():
                await events
            await course
            # One reader at a time: while one asks the roles for a step's part, another would be told of the same step.
            await _cancelled(events)
            await self._drain_events()
            self._status = (await self._ask(GET_STATUS, GetStatus())).data
        finally:
            for task in (events, course):
                await _cancelled(task)

    async def _course(self) -> None:
        config = self._config
        if self._only_eval:
            await self._evaluate("eval")
            return
        if config.eval.before and config.eval.tasks and "before" not in self._evals:  # a resumed run has had it
            await self._evaluate("before")
        await self._since_last_step()  # an evaluation's part is no step's
        await self._ask(OPEN_TRAINING, OpenTraining(config.steps))
        self._last_step = time.monotonic()
        # Per rank. Shielded, because a cancelled course must not take the learner's end with it.
        ends = await asyncio.shield(self._learned)
        for end in ends or ():
            if isinstance(end, BaseException):
                raise end  # there is nothing to evaluate
        if config.eval.after and config.eval.tasks:
            await self._evaluate("after")

    # --- evaluation ---------------------------------------------------------------------------------------------------

    async def _evaluate(self, name: str) -> None:
        config = self._config.eval
        suite = load_suite(self._config.task.env, self._config.task.args)
        tasks = suite.tasks("eval", config.tasks, self._config.seed)
        when = "" if self._only_eval else f" {name} training"
        self._say(f"evaluating{when} on {len(tasks)} held-out tasks")
        began = time.monotonic()
        await self._ask(START_EVAL, StartEval(name, tasks, config.temperature))
        try:
            async with asyncio.timeout(config.deadline_seconds):
                state = await self._wait_eval(name)
        except TimeoutError:
            raise RunFailed(
                "scheduler",
                f"The evaluation ({name}) was not done within eval.deadline_seconds = {config.deadline_seconds:g}: "
                "raise it, or lower eval.tasks.",
            ) from None
        if state.failed:
            self._say_failed(name, state)
        success = sum(state.success) / len(state.success) if state.success else 0.0
        self._evals[name] = EvalResult(success, state.n, state.failed)
        write_json(self._run.evals, {name: dataclasses.asdict(result) for name, result in self._evals.items()})
        self._say(
            f"eval{when}: success {success:.3f} "
            f"on {state.n} held-out tasks ({state.failed} failed), {time.monotonic() - began:.1f} s"
        )

    def _say_failed(self, name: str, state: EvalStateReply) -> None:
        """Raises if no episode finished: there is nothing to measure, and training would fail in the same way."""
        what = f"episodes of the evaluation ({name}) failed on every attempt, the last with {state.example}"
        if state.failed < state.n:
            self._say(f"warning: {state.failed} of {state.n} {what}.")
        elif state.users:
            traceback = f"{self._run.env_log()} has the traceback; " if state.raised else ""
            raise UserError(f"All {state.n} {what}: {traceback}mend the environment or its data.")
        else:
            raise RunFailed("scheduler", f"All {state.n} {what}: look into {self._run.logs}.")

    async def _wait_eval(self, name: str) -> EvalStateReply:
        await self._evaluated(name).wait()
        return await self._ask(EVAL_STATE, EvalState(name))

    def _evaluated(self, name: str) -> asyncio.Event:
        """Set by the scheduler's event that this evaluation is done."""
        return self._eval_events.setdefault(name, asyncio.Event())

    # --- events -------------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            await self._take_events(WATCH_SECONDS)

    async def _take_events(self, wait: float, count: bool = True) -> bool:
        """Whether there were any; with `count` the roles are asked at each step."""
        reply = await self._ask(WATCH_EVENTS, WatchEvents(self._seen, wait), CALL_SECONDS + wait)
        for event in reply.events:
            now = time.monotonic()
            since = await self._since_last_step() if count and event.what == "step" else {}
            self._seen = event.number  # only now: whoever is cancelled while it waits has not seen the event
            self._on_event(event, now, since)
        return bool(reply.events)

    async def _drain_events(self, count: bool = True) -> None:
        """What the scheduler has to tell up to now."""
        with contextlib.suppress(RunFailed, UserError):
            while await self._take_events(0.0, count):
                pass

    async def catch_up(self) -> None:
        """After a course that was cancelled or failed: steps that were trained meanwhile are noted as all others are, but for
        what the roles counted: they may be gone."""
        with contextlib.suppress(RunFailed, UserError, TimeoutError):
            async with asyncio.timeout(LAST_EVENTS_SECONDS):
                await self._drain_events(count=False)

    async def _since_last_step(self) -> dict[str, Any]:
        """What the roles have counted since they were last asked (`segue.report.counted`)."""
        facts = await self._counts(NAMES)
        now = {target: samples for fact in facts.values() for target, samples in fact.metrics.items()}
        before, self._counted = self._counted, {**self._counted, **now}
        return counted(difference(before, now))

    def _on_event(self, event: RunEvent, now: float, since: Mapping[str, Any]) -> None:
        if event.what == "step":
            line = self._line(event.data, now, since)
            self._lines.append(line)
            self._say(step_text(line, self._config.steps))
        elif event.what == "eval":
            self._evaluated(event.data["name"]).set()
        elif event.what == "warning":
            self._say(f"warning: {event.data['sentence']}")
        elif event.what == "fatal":
            sentence = event.data["sentence"]
            raise UserError(sentence) if event.data.get("users") else RunFailed(event.data.get("part", "scheduler"), sentence)

    def _line(self, data: Mapping[str, Any], now: float, since: Mapping[str, Any]) -> dict[str, Any]:
        """The line of a step that ended `now`: what the learner reported, what the scheduler counted at that acknowledgement, and
        what the roles have counted `since` the one before."""
        scheduler, stats = data["scheduler"], dict(data["stats"])
        bill, before = scheduler["reprefill"], self._reprefill
        self._reprefill = bill["tokens"], bill["seconds"]
        dropped, known = scheduler["redundant"], self._redundant
        self._redundant = dropped["episodes"], dropped["tokens"]
        began, self._last_step = self._last_step, now
        return step_line(
            data["step"],
            elapsed_seconds=self._earlier_seconds + now - self._began,
            step_seconds=now - began,
            wait_seconds=self._wait(stats, now - began),
            version=scheduler["newest_version"],
            queue_groups=scheduler["queue"]["ready"],
            in_flight=scheduler["episodes"]["states"]["leased"],
            ages=data["ages"],
            reprefill={**bill, "tokens": bill["tokens"] - before[0], "seconds": bill["seconds"] - before[1]},
            stats=stats,
            redundant=(dropped["episodes"] - known[0], dropped["tokens"] - known[1]),
            since=since,
        )

    def _wait(self, stats: dict[str, Any], step_seconds: float) -> float:
        """How long the learner waited within this step; taken out of its `stats`.

        It waits for its first batch from its start on, before the evaluation, and the first step begins when training is opened:
        of that wait no more is the step's than the learner's phases leave. (In serial mode the two are on different clocks.)
        """
        waited: float = stats.pop("wait_seconds", 0.0)
        first, self._first = self._first, False
        if not first or self._serial:
            return waited
        computed: float = sum(seconds for name, seconds in stats.items() if name.endswith("_seconds"))
        return min(waited, max(0.0, step_seconds - computed))

    def _say(self, line: str) -> None:
        print(line, file=self._console, flush=True)

    async def _ask(self, rpc: Rpc[Q, R], request: Q, timeout: float = CALL_SECONDS) -> R:
        try:
            return await ask(self._scheduler, rpc, request, timeout)
        except RemoteError as error:
            raise RunFailed("scheduler", f"The scheduler could not answer {rpc.name}: {error.sentence}") from error
        except (PeerLost, PeerTimeout) as error:
            raise RunFailed("scheduler", f"The scheduler did not answer {rpc.name}: {error}.") from error

    # --- the end ------------------------------------------------------------------------------------------------------

    async def stop(self, reason: str) -> None:
        """Tell the scheduler that the run ends; it releases whoever waits. A scheduler that is gone needs no telling."""
        with contextlib.suppress(RunFailed):
            await self._ask(STOP_RUN, StopRun(reason), 5.0)

    def finish(self, facts: Mapping[str, Facts], silent: Sequence[str] = ()) -> dict[str, Any]:
        """Write summary.json and print the table. `facts` come from every role process but those in `silent`."""
        self._lines.close()
        status = self._status
        summary = build_summary(
            RunFacts(
                mode=self._config.mode,
                bound=age_bound(self._run, self._config),
                attempts=max(1, self._run.attempts()),
                wall_seconds=self._earlier_seconds + time.monotonic() - self._began,
                lines=read_jsonl(self._run.metrics),
                episodes=_episodes(status["episodes"]),
                weight_sync=WeightSyncFigures.from_status(status["updates"]),
                node_updates=status["counts"].get("updates", {}),
                coalesced=status["counts"].get("updates_coalesced", {}),
                metrics={target: samples for fact in facts.values() for target, samples in fact.metrics.items()},
                states={target: seconds for fact in facts.values() for target, seconds in fact.states.items()},
                evals=self._evals,
                notes=self._notes(silent),
            )
        )
        write_json(self._run.summary, summary)
        print_summary(summary, f"Run {self._run.path}", cast(IO[str], self._console))
        self._say(f"Everything is in {self._run.path}: summary.json, metrics.jsonl, logs/, trajectories/, checkpoints/.")
        return summary

    def _notes(self, silent: Sequence[str]) -> list[str]:
        """What a reader of the figures must know."""
        notes = [f"{name} gave no figures at the end: sums over its role lack its part." for name in silent]
        known = {line["step"] for line in read_jsonl(self._run.metrics)}
        if lacking := sorted(set(range(max(known, default=-1))) - known):
            notes.append(
                f"metrics.jsonl lacks {len(lacking)} steps (the first is {lacking[0]}), trained by an attempt that died before "
                "it wrote them down: their figures are missing here."
            )
        if self._run.attempts() > 1:
            notes.append(
                "The run was resumed: tokens.generated, prefill, reprefill, roles and weight_sync are the last attempt's alone."
            )
        if self._serial:
            notes.append(
                "Serial mode: the seconds of roles and weight_sync, and wait_seconds, are those of the logical clock "
                "([serial] sets what work costs); the seconds of the run and of its steps are real."
            )
        if self._config.staleness.over_age == "train":
            notes.append("staleness.over_age = 'train': tokens above staleness.max_age were trained.")
        return notes


def _read_evals(run: RunDir) -> dict[str, EvalResult]:
    """What earlier attempts evaluated before training; anything later they would do again."""
    try:
        known = json.loads(run.evals.read_text(encoding="utf-8"))
        return {"before": EvalResult(**known["before"])} if "before" in known else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{run.evals} cannot be read ({error}): restore it, or remove it to evaluate again.") from None


def _episodes(counts: Mapping[str, Any]) -> EpisodeCounts:
    """The scheduler's counts; it splits the dropped by "reason|stage", the summary by reason."""
    dropped: dict[str, int] = {}
    for key, number in counts["dropped"].items():
        reason = key.partition("|")[0]
        dropped[reason] = dropped.get(reason, 0) + number
    trained = counts["states"]["trained"]
    return EpisodeCounts.from_status({**counts, "dropped": dropped, "trained": trained})


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end; what it raises was looked at before, or no longer counts."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
