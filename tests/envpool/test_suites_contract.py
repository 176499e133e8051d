"""What every suite must hold to, whatever it plays: determinism, snapshots, replay, ends, scores."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from envpool.environment import Environment, Suite, play
from envpool.suites import SUITES, load_suite
from segue.episode import Task
from segue.ports.envpool import Observation, Resume, StepResult, observation_digest

CASES: list[tuple[str, dict[str, Any]]] = [
    ("search_qa", {}),
    ("search_qa", {"facts": ["cities"], "digits": 5, "operations": ["times", "plus"], "top": 3, "instructions": True}),
    ("latency", {"turns_min": 2, "turns_max": 7, "words_max": 20}),
    ("latency", {"turns_min": 3, "snapshots": False}),
    ("price_list", {}),
    ("price_list", {"asked": [2], "items": 12, "examples": 0}),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}{len(case[1])}")
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    param: tuple[str, dict[str, Any]] = request.param
    return param


@pytest.fixture(scope="module")
def suite(case: tuple[str, dict[str, Any]]) -> Suite:
    return load_suite(*case)


def test_every_shipped_suite_is_tested() -> None:
    assert {name for name, _ in CASES} == set(SUITES)


def scripts(suite: Suite, task: Task) -> list[list[str]]:
    """Sequences of actions: the oracle's, a clumsy one, garbage."""
    rng = random.Random(task.seed)
    oracle = [turn.action for turn in play(suite.make(task, 0), task, suite.oracle(task)).turns]
    clumsy = [turn.action for turn in suite.demonstrate(task, rng, 0.0).turns]
    return [oracle, ["", "garbage <", *oracle], clumsy, ["?"] * 20]


def run(environment: Environment, actions: list[str]) -> list[StepResult]:
    """Results until the script or the episode ends."""
    results = []
    for action in actions:
        results.append(environment.step(action))
        if results[-1].terminated or results[-1].truncated:
            break
    return results


def test_snapshot_at_every_step_restored_elsewhere_gives_an_equal_future(suite: Suite) -> None:
    """No public system verifies this (environments.md §5). The snapshot is all that crosses; a replay needs not even that."""
    for task in suite.tasks("train", 5, 0):
        for script in scripts(suite, task):
            whole = suite.make(task, 3)
            first = whole.reset(task, task.seed)
            expected = run(whole, script)
            for k in range(len(expected)):
                lived = suite.make(task, 3)
                lived.reset(task, task.seed)
                run(lived, script[:k])
                other = suite.make(task, 3, attempt=2)
                if lived.resume == Resume.SNAPSHOT:
                    snapshot = bytes(lived.snapshot())
                    run(lived, script[k : k + 1])  # what the lost instance went on to do must not matter
                    seen = other.restore(snapshot)
                    assert other.snapshot() == snapshot
                else:
                    assert lived.resume == Resume.REPLAY
                    seen = other.reset(task, task.seed)
                    for result in run(other, script[:k]):
                        seen = result.observation
                assert seen.messages == (expected[k - 1].observation if k else first).messages
                assert run(other, script[k:]) == expected[k:]


def test_same_seed_same_episode_with_other_instances_stepped_between(suite: Suite) -> None:
    """F75. Random state belongs to the instance, and reset truly resets."""
    tasks = suite.tasks("train", 6, 1)
    for task in tasks[:3]:
        script = scripts(suite, task)[1]
        alone = suite.make(task, 1)
        first = alone.reset(task, task.seed)
        expected = run(alone, script)
        others = [suite.make(other, 0) for other in tasks[3:]]
        for other, other_task in zip(others, tasks[3:], strict=True):
            other.reset(other_task, other_task.seed)
        again = suite.make(task, 1)
        assert again.reset(task, task.seed) == first
        results = []
        random.seed(0)
        for k in range(len(expected)):
            random.random()
            others[k % 3].step("x") if k < 3 else None
            results += run(again, [script[k]])
        assert results == expected
        assert again.reset(task, task.seed) == first, "a reset of a used instance leaks"
        assert run(again, script) == expected


def test_members_of_a_group_see_the_same_first_observation(suite: Suite) -> None:
    """F75."""
    digests: list[int] = []
    for task in suite.tasks("train", 10, 2):
        seen = {
            observation_digest(suite.make(task, member, attempt).reset(task, task.seed))
            for member in range(8)
            for attempt in (1, 2)
        }
        assert len(seen) == 1
        digests += seen
    assert len(set(digests)) > 5, "tasks look alike"


def test_oracle_succeeds_and_a_random_policy_does_not(suite: Suite) -> None:
    rng = random.Random(0)
    words = suite.vocabulary()

    def babble(_: Observation) -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, 6)))

    tasks = suite.tasks("eval", 30, 0)
    assert all(play(suite.make(t, 0), t, suite.oracle(t)).success == 1.0 for t in tasks)
    assert all(play(suite.make(t, 0), t, suite.oracle(t)).reward == pytest.approx(1.0) for t in tasks)
    assert sum(play(suite.make(t, 0), t, babble).success for t in tasks) / len(tasks) < 0.1


@pytest.mark.parametrize("action", ["", " ", "\0", "garbage", "<answer>", "\ud800", "x" * 100_000, "<search>" * 1000])
def test_bad_actions_score_nothing_and_raise_nothing(suite: Suite, action: str) -> None:
    for task in suite.tasks("eval", 10, 0):
        environment = suite.make(task, 0)
        environment.reset(task, task.seed)
        for _ in range(3):
            result = environment.step(action)
            assert result.info.get("success", 0.0) == 0.0 and result.reward <= 0.0
            for message in result.observation.messages:
                message.content.encode()
            if result.terminated or result.truncated:
                break


def test_an_episode_ends_once_and_takes_no_step_afterwards(suite: Suite) -> None:
    """F77: the last observation belongs to the finished episode; nothing resets by itself."""
    for task in suite.tasks("train", 5, 0):
        for script in scripts(suite, task):
            environment = suite.make(task, 0)
            environment.reset(task, task.seed)
            results = run(environment, script)
            assert not any(result.terminated and result.truncated for result in results)
            assert results[-1].observation.messages[-1].content
            if results[-1].terminated or results[-1].truncated:
                with pytest.raises(RuntimeError):
                    environment.step("x")


def test_tasks_are_deterministic_distinct_and_the_splits_disjoint(suite: Suite, case: tuple[str, dict[str, Any]]) -> None:
    again = load_suite(*case)
    for split in ("train", "eval"):
        tasks = suite.tasks(split, 100, 5)
        assert tasks == again.tasks(split, 100, 5)
        assert len({task.id for task in tasks}) == 100
        assert all(task.env == suite.name for task in tasks)
        assert tasks == msgspec.json.decode(msgspec.json.encode(tasks), type=list[Task])
    train = {task.id for seed in range(3) for task in suite.tasks("train", 300, seed)}
    held_out = {task.id for seed in range(3) for task in suite.tasks("eval", 300, seed)}
    assert not train & held_out


def test_everything_that_crosses_a_process_border_survives_it(suite: Suite) -> None:
    for task in suite.tasks("train", 5, 0):
        environment = suite.make(task, 0)
        first = environment.reset(task, task.seed)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(first), type=Observation) == first
        for result in run(environment, scripts(suite, task)[1]):
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result


def test_a_suite_teaches_at_the_asked_quality(suite: Suite) -> None:
    rng = random.Random(0)
    tasks = suite.tasks("train", 300, 0)
    share: Callable[[float], float] = lambda good: sum(suite.demonstrate(t, rng, good).success for t in tasks) / len(tasks)  # noqa: E731
    assert share(1.0) == 1.0 and share(0.0) < 0.1 and 0.3 < share(0.5) < 0.7
