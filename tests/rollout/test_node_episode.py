"""Whole episodes through a node: what is logged, what is trainable, how turns and episodes end."""

from __future__ import annotations

import asyncio
from typing import Any

import chat_tokenizers as made
import numpy as np
import pytest
from fake_engine import logprob
from fake_scheduler import Record
from node_world import World, config, renderer, run, words_policy

from segue.clock import now
from segue.episode import Outcome, Task
from segue.ports.engine import GenerateRequest
from segue.ports.envpool import EnvFailed
from segue.ports.rollout import Fail, Finish
from segue.trajectory import Author


def talk(turns: int = 3, seed: int = 1, **payload: object) -> Task:
    return Task(f"task-{seed}", "talk", seed, {"turns": turns, **payload})


def one(task: Task, world: World | None = None, **lease: Any) -> tuple[Record, World]:
    """Run one episode to its end."""
    w = world or World()

    async def main() -> Record:
        async with w:
            await w.lease(0, task=task, **lease)
            return await w.scheduler.until(0, lambda r: not r.leased)

    return run(main()), w


def finish_of(record: Record) -> Finish:
    assert record.finish is not None, record.fails
    return record.finish


def test_the_log_is_the_templates_own_render_and_only_sampled_tokens_are_trainable() -> None:
    """F67, F73, F83: token ids threaded end to end."""
    record, _ = one(talk(turns=4))
    finish, log = finish_of(record), record.log()
    log.validate()
    assert (finish.outcome, finish.turns, finish.info) == (Outcome.TERMINATED, 4, {"success": 1.0, "turns": 4.0})
    bodies = record.bodies()
    records = [b.record for b in bodies if b.record is not None]
    assert [r.turn for r in records] == [-1, 0, 1, 2, 3]
    assert finish.reward == pytest.approx(sum(r.reward for r in records))
    tokenizer = made.words()
    actions = [r.action for r in records[1:]]
    observations = [tokenizer.decode(b.log.tokens.tolist()) for b in bodies if b.record is not None and b.record.turn >= 0]
    conversation = [
        {"role": "system", "content": "You are a careful assistant."},
        {"role": "user", "content": "Where is the lamp? 1"},
    ]
    for action, observation in zip(actions, observations, strict=True):
        conversation.append({"role": "assistant", "content": action})
        if observation:
            conversation.append(
                {"role": "tool", "content": observation.removeprefix("<tool> ").removesuffix(" <end> <assistant>")}
            )
    rendered = tokenizer.apply_chat_template(conversation, tokenize=True)["input_ids"]
    assert log.tokens.tolist() == rendered
    # What is trained is exactly what the engine sampled, with its log-probabilities; the last observation is nobody's context.
    sampled = log.tokens[log.mask == 1].tolist()
    assert tokenizer.decode(sampled) == " ".join(f"{a} <end>" for a in actions)
    assert log.logprobs[log.mask == 1].tolist() == pytest.approx([np.float32(logprob(t)) for t in sampled])
    assert observations[-1] == ""
    assert set(log.versions[log.mask == 1].tolist()) == {1}


def test_requests_carry_the_whole_context_and_what_fixes_the_noise() -> None:
    record, w = one(talk(turns=3), group=4, seed=77)
    log, requests = record.log(), w.node.engine.requests
    starts = [sum(s.length for s in log.segments[:i]) for i, s in enumerate(log.segments) if s.author == Author.ASSISTANT]
    assert [len(r.tokens) for r in requests] == starts
    assert all(r.tokens == log.tokens[: len(r.tokens)].tolist() for r in requests)
    assert [r.offset for r in requests] == [int(log.mask[:n].sum()) for n in starts]
    assert {(r.seed, r.priority, r.group, r.episode, r.lineage) for r in requests} == {(77, 4, 4, 0, 1)}
    assert len({r.id for r in requests}) == len(requests)


def test_a_stop_string_ends_the_turn_and_the_harness_closes_it_masked() -> None:
    """environments.md §10.3: the close token behind a tool call is forced, and carries no loss."""
    stop_id = made.words().convert_tokens_to_ids("</search>")

    def policy(request: GenerateRequest, index: int) -> int:
        return stop_id if (index + 1) % 4 == 0 else 20 + index

    record, _ = one(talk(turns=2, stop=["</search>"]), World(policy=policy))
    log, close = record.log(), renderer().close_tokens[-1]
    turns = [b for b in record.bodies() if b.action_complete]
    for body in turns:
        assert body.log.tokens.tolist()[-2:] == [stop_id, close]
        assert body.log.mask.tolist() == [1, 1, 1, 1, 0]
        assert body.action.endswith("</search>") and "<end>" not in body.action
    assert int(log.mask.sum()) == 8


def test_a_turn_that_ends_by_length_is_closed_and_given_to_the_environment_as_it_is() -> None:
    w = World(config(rollout={"max_turn_tokens": 7}), policy=lambda request, index: 20)
    record, _ = one(talk(turns=2), w)
    for body in (b for b in record.bodies() if b.action_complete):
        assert body.log.mask.tolist() == [1] * 7 + [0]
        assert len(body.action.split()) == 7
    assert finish_of(record).outcome == Outcome.TERMINATED


@pytest.mark.parametrize(("turns", "outcome"), [(4, Outcome.TERMINATED), (5, Outcome.TRUNCATED_TURNS)])
def test_turn_budget(turns: int, outcome: Outcome) -> None:
    """An episode that ends on its last allowed turn is terminated, not truncated."""
    record, _ = one(talk(turns=turns), World(config(rollout={"max_turns": 4})))
    assert (finish_of(record).outcome, finish_of(record).turns) == (outcome, 4)


@pytest.mark.parametrize(
    ("max_tokens", "used", "last_action"),
    [
        (71, 71, 4),  # prompt 15, three turns of 10 + 1 and 6, and a fourth that has 4 + 1 left
        (68, 68, 1),
        (67, 66, None),  # no room for a token and its close behind the third observation
    ],
)
def test_token_budget_is_kept_exactly(max_tokens: int, used: int, last_action: int | None) -> None:
    """Never above `max_tokens`; the last action uses what is left of it, and an exact fit is kept."""
    cfg = config(rollout={"max_tokens": max_tokens, "max_turn_tokens": 10, "max_turns": 50})
    record, w = one(talk(turns=99), World(cfg, policy=lambda request, index: 20))
    assert finish_of(record).outcome == Outcome.TRUNCATED_TOKENS
    assert len(record.log()) == used
    assert finish_of(record).turns == (3 if last_action is None else 4)
    if last_action is not None:
        assert w.node.engine.requests[-1].max_tokens == last_action


def test_wall_budget_ends_a_running_request_and_keeps_its_tokens() -> None:
    cfg = config(rollout={"wall_seconds": 1.0, "max_turn_tokens": 300, "max_tokens": 4000})
    record, w = one(talk(turns=2), World(cfg, policy=lambda request, index: 20, step=0.02))
    finish, log = finish_of(record), record.log()
    assert finish.outcome == Outcome.TRUNCATED_WALL
    assert finish.seconds == pytest.approx(1.0, abs=0.03)
    assert 40 <= int(log.mask.sum()) == w.node.engine.decoded <= 50, "every token sampled until then is in the log"
    assert w.node.metrics.value("segue_discarded_tokens_total") == 0


def test_wall_budget_lets_a_running_step_end() -> None:
    w = World(config(rollout={"wall_seconds": 1.0}), latency=0.4)
    record, _ = one(talk(turns=6), w)
    assert finish_of(record).outcome == Outcome.TRUNCATED_WALL
    assert record.bodies()[-1].record is not None, "the last step is recorded"


def test_a_long_observation_is_cut_and_says_so() -> None:
    text = " ".join(["lamp"] * 500)
    record, _ = one(talk(turns=2, reply=text), World(config(rollout={"max_tokens": 200, "max_turn_tokens": 10})))
    observation = next(b for b in record.bodies() if b.record is not None and b.record.turn == 0)
    shown = made.words().decode(observation.log.tokens.tolist())
    assert shown.count("lamp") > 100 and len(record.log()) <= 200
    assert finish_of(record).outcome == Outcome.TERMINATED and finish_of(record).turns == 2, "a whole action still fitted"


@pytest.mark.parametrize(("words", "next_action", "cut"), [(169, 1, False), (170, 10, True)])
def test_an_observation_is_whole_if_a_single_token_can_follow_it(words: int, next_action: int, cut: bool) -> None:
    """Prompt 15, action 10 + 1, and three tokens around the observation: 169 words leave one token and its close of 200."""
    cfg = config(rollout={"max_tokens": 200, "max_turn_tokens": 10})
    record, w = one(talk(turns=2, reply=" ".join(["lamp"] * words)), World(cfg, policy=lambda request, index: 20))
    assert w.node.engine.requests[1].max_tokens == next_action
    observation = next(b.log for b in record.bodies() if b.record is not None and b.record.turn == 0)
    assert (observation.tokens.tolist().count(made.words().convert_tokens_to_ids("lamp")) < words) == cut


def test_an_observation_bound_of_its_own() -> None:
    text = " ".join(["lamp"] * 100)
    cfg = config(rollout={"max_observation_tokens": 40})
    record, _ = one(talk(turns=3, reply=text), World(cfg))
    cut = [b.log for b in record.bodies() if b.record is not None and 0 <= b.record.turn < 2]
    assert all(30 < len(log) <= 40 for log in cut)


def test_a_prompt_that_leaves_no_room_is_a_data_failure() -> None:
    record, _ = one(talk(), World(config(rollout={"max_tokens": 16, "max_turn_tokens": 8})))
    assert [(f.failure, f.reason) for f in record.fails] == [("data", "unusable")]
    assert record.deltas == []


def test_a_prompt_far_too_long_is_not_even_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold up the node's loop for longer than its leases last."""
    world = World(config(rollout={"max_tokens": 16, "max_turn_tokens": 8}))
    monkeypatch.setattr("rollout.fit.CHARACTERS_PER_TOKEN", 1)
    monkeypatch.setattr("rollout.chat.ChatRenderer.prompt_log", lambda *_: pytest.fail("it was tokenized"))
    record, _ = one(talk(), world)
    assert [(f.failure, f.reason) for f in record.fails] == [("data", "unusable")]


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_environment_failures_keep_their_class_and_touch_nobody_else(step: int) -> None:
    """F64, F68: a failure is a typed result; no error text becomes an observation."""
    w = World()
    w.pool.fail = lambda e, a, s: EnvFailed(e, a, s, "env", "crashed", "boom") if (e, s) == (0, step) else None

    async def main() -> None:
        async with w:
            for episode in range(3):
                await w.lease(episode)
            record = await w.scheduler.until(0, lambda r: not r.leased)
            assert record.fails == [Fail(0, 1, "env", "crashed", "boom")], "what it raised is told too"
            assert all("boom" not in b.action for b in record.bodies())
            for episode in (1, 2):
                assert (await w.scheduler.finished(episode)).finish is not None

    run(main())


def test_a_reward_that_is_no_number_is_a_data_failure() -> None:
    record, _ = one(talk(reward=float("nan")))
    assert [(f.failure, f.reason) for f in record.fails] == [("data", "bad_reward")]


def test_an_unforeseen_error_fails_its_episode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """F64: the failed episode carries its own exception; the others finish."""
    w = World()

    async def main() -> None:
        async with w:
            await w.lease(0)
            await w.lease(1)
            loop = w.node.shell._loops[0]
            monkeypatch.setattr(loop, "_fit", lambda observation: 1 // 0)
            record = await w.scheduler.until(0, lambda r: not r.leased)
            assert record.fails == [Fail(0, 1, "infra", "internal_error", "integer division or modulo by zero")]
            await w.scheduler.finished(1)
            assert not w.node.shell.failed.done()

    run(main())


@pytest.mark.parametrize(
    ("says", "named"), [("turns in order", "episode 0, attempt 1: turns in order"), ("", "episode 0, attempt 1")]
)
def test_a_broken_assertion_ends_the_node_and_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, says: str, named: str) -> None:
    """What our code takes for granted is not so: as an `infra` failure it would be hidden under retries."""
    w = World()

    def broken(observation: object) -> None:
        raise AssertionError(says) if says else AssertionError

    async def main() -> None:
        async with w:
            await w.lease(0)
            await w.lease(1)
            monkeypatch.setattr(w.node.shell._loops[0], "_fit", broken)
            with pytest.raises(AssertionError, match=f"^{named}$"):
                await w.node.shell.run()
            record = await w.scheduler.until(0, lambda r: not r.leased)
            assert record.fails == [Fail(0, 1, "infra", "internal_error", says)]
            assert w.scheduler.episodes[1].fails == [Fail(1, 1, "infra", "node_failed")], "the rest is told of too"

    run(main())


def test_nothing_is_left_behind() -> None:
    w = World()

    async def main() -> None:
        async with w:
            for episode in range(12):
                await w.lease(episode)
            for episode in range(12):
                await w.scheduler.finished(episode)
            assert w.pool.instances == {} and w.node.engine._open == {} and w.node.engine._kv == {}
            assert w.node.shell._running == {} and w.node.shell._loops == {}
            accepted = {a for a in w.pool.accepted if a[2] >= 0}
            assert accepted <= {(e, 1, s) for e in range(12) for s in range(3)} and len(accepted) >= 12

    run(main())


def test_prefill_causes_sum_to_the_engines_own_count() -> None:
    w = World(policy=words_policy(9))

    async def main() -> None:
        async with w:
            for episode in range(6):
                await w.lease(episode, group=episode)
            for kick in range(5):
                await asyncio.sleep(0.07)
                w.node.engine.evict(kick)
                w.node.engine.preempt((kick + 1) % 6)
            for episode in range(6):
                await w.scheduler.finished(episode)
            counts, metrics = w.node.shell.counts(), w.node.metrics
            causes = {c: counts[f"prefill_{c}"] for c in ("first", "turn", "preemption", "eviction")}
            assert all(causes.values()), causes
            assert sum(causes.values()) == counts["prefill_tokens"] == w.node.engine.prefill
            assert counts["cached_tokens"] == w.node.engine.cached
            assert metrics.value("segue_prefill_tokens_total") == metrics.value("segue_engine_prefill_tokens_total")
            assert metrics.value("segue_decode_tokens_total") == w.node.engine.decoded

    run(main())


def test_state_seconds_sum_to_elapsed_time() -> None:
    w = World(latency=0.3)

    async def main() -> None:
        async with w:
            await w.lease(0)
            await w.scheduler.finished(0)
            states = w.node.activity.seconds()
            assert sum(states.values()) == pytest.approx(now() - w.node.began)
            assert states["wait_env"] > 4 * 0.29 and states["generate"] > 0 and states["wait_weights"] > 0.5
            assert states["other"] < 0.05 * sum(states.values())

    run(main())
