"""One question: search, calculate, answer."""

from __future__ import annotations

from typing import Any

import msgspec

from envpool.environment import DataError
from envpool.suites.search_qa.actions import FORMS, TOOLS, Malformed, parse_action
from envpool.suites.search_qa.calculator import CalculatorError, calculate
from envpool.suites.search_qa.retriever import Retriever
from envpool.suites.search_qa.verifier import matches, normalise
from segue.episode import Task
from segue.ports.envpool import ChatMessage, Observation, Resume, StepResult

CHAIN = 4
"""Actions that a question needs: two look-ups, a calculation, the answer."""
STEP_PENALTY = 0.01
FORMAT_PENALTY = 0.02
"""Per action beyond the chain, and per malformed action. Over the longest episode both together stay far below success (1)."""
MAX_ACTION = 2000
INSTRUCTIONS = (
    "Answer the question with one number. In each turn write exactly one of: <search>words</search> looks words up, "
    "<calc>sum</calc> calculates, <answer>number</answer> ends the episode. Results come back in <information> tags."
)
STOP = [f"</{tool}>" for tool in TOOLS]


class _State(msgspec.Struct):
    """Everything that a snapshot holds."""

    steps: int = 0
    malformed: int = 0
    ended: bool = False
    last: str = ""


class SearchQA:
    """Deterministic: no random state. Reward: 1 for the right answer, less small penalties; nothing for trying less."""

    resume = Resume.SNAPSHOT

    def __init__(self, task: Task, retriever: Retriever, top: int, max_steps: int, instructions: bool) -> None:
        self._task = task
        self._retriever = retriever
        self._top = top
        self._max_steps = max_steps
        self._instructions = instructions
        self._state = _State()

    def reset(self, task: Task, seed: int) -> Observation:
        self._task = task
        self._state = _State()
        return self._prompt()

    def step(self, action: str) -> StepResult:
        state = self._state
        if state.ended:
            raise RuntimeError("step after the end of the episode")
        state.steps += 1
        penalty = STEP_PENALTY if state.steps > CHAIN else 0.0
        tool, success, malformed = "malformed", 0.0, False
        try:
            parsed = parse_action(action[:MAX_ACTION] if isinstance(action, str) else action)
            tool = parsed.tool
            if tool == "answer":
                success = float(matches(parsed.text, self._truth()))
                state.ended = True
                reply = "right" if success else "wrong"
            else:
                reply = self._look_up(parsed.text) if tool == "search" else self._calculate(parsed.text)
        except Malformed as error:
            malformed = True
            state.malformed += 1
            penalty += FORMAT_PENALTY
            reply = f"{error}: {FORMS}"
        truncated = not state.ended and state.steps >= self._max_steps
        terminated = state.ended
        state.ended = terminated or truncated
        state.last = f"<information>{reply}</information>"
        info = {"success": success, "malformed": float(malformed), "penalty": penalty}
        info.update({f"used_{name}": float(tool == name) for name in TOOLS})
        return StepResult(self._observation(), success - penalty, terminated, truncated, info)

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self._state)

    def restore(self, snapshot: bytes) -> Observation:
        self._state = msgspec.msgpack.decode(snapshot, type=_State)
        return self._observation() if self._state.steps else self._prompt()

    def close(self) -> None:
        pass

    def _look_up(self, query: str) -> str:
        found = self._retriever.search(query, self._top)
        return "; ".join(found) if found else "nothing found"

    def _calculate(self, expression: str) -> str:
        try:
            return calculate(expression)
        except CalculatorError as error:
            return f"calc failed: {error}"

    def _truth(self) -> str:
        truth: Any = self._task.payload.get("answer")
        if not isinstance(truth, str) or not normalise(truth):
            raise DataError(f"the task {self._task.id} has no usable answer: {truth!r}")
        return truth

    def _prompt(self) -> Observation:
        question: Any = self._task.payload.get("question")
        if not isinstance(question, str):
            raise DataError(f"the task {self._task.id} has no question")
        messages = [ChatMessage("system", INSTRUCTIONS)] if self._instructions else []
        return Observation([*messages, ChatMessage("user", question)], stop=STOP)

    def _observation(self) -> Observation:
        return Observation([ChatMessage("user", self._state.last)], stop=STOP)
