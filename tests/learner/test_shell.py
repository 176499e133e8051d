"""The learner's shell against the protocol: order of calls, checkpoints with the scheduler's cut, stops, deadlines, failures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from learner_data import learner_config, random_batch, tiny_llama
from learner_scheduler import Learner, on_logical_loop

from learner.checkpoints import model_folder, open_checkpoint
from learner.feed import produced
from segue.clock import ThreadCompute
from segue.errors import RunFailed, UserError
from segue.ports.learner import Batch, TrainedReport
from segue.ports.rpc import PeerLost
from segue.rundir import RunDir


def batch_of_step(step: int) -> Batch:
    """Every trajectory of the batch of step k was sampled by the weights of step k or k − 1 (version = step)."""
    return random_batch(seed=step, step=step, versions=(max(0, step - 1), step))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny_llama(seed=1).save_pretrained(folder)
    return folder


def _without_seconds(report: TrainedReport) -> dict[str, float]:
    return {name: value for name, value in report.stats.items() if not name.endswith("_seconds")}


def test_a_run_follows_the_protocol(tmp_path: Path, model: Path) -> None:
    async def work() -> Learner:
        learner = Learner(tmp_path, model, batch_of_step)
        await learner.run()
        return learner

    learner = on_logical_loop(work)
    said = [item for item in learner.scheduler.heard if item[0] != "take"]
    assert said == [
        ("publish", 0),
        ("trained", 0),
        ("publish", 1),
        ("trained", 1),
        ("committed", 2),
        ("publish", 2),
        ("trained", 2),
        ("publish", 3),
        ("trained", 3),
        ("committed", 4),
        ("publish", 4),
    ]
    assert [item for item in learner.scheduler.heard if item[0] == "take"] == [("take", k) for k in range(4)]
    assert [open_checkpoint(folder.path).cut() for folder in RunDir(tmp_path).complete_checkpoints()] == [
        b"cut of 1",
        b"cut of 3",
    ]
    assert list(learner.sender.published) == [0, 1, 2, 3, 4]
    before, after = learner.sender.published[0], learner.sender.published[4]
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    assert learner.shell.version == 4


def test_metrics_and_states_of_a_run(tmp_path: Path, model: Path) -> None:
    waiting: list[float] = []

    async def work() -> Learner:
        learner = Learner(tmp_path, model, batch_of_step)
        learner.scheduler.on_trained = lambda step: waiting.append(learner.metrics.value("segue_queue_depth", queue="prefetch"))
        await learner.run()
        assert sum(learner.clock.seconds().values()) == pytest.approx(asyncio.get_running_loop().time())
        assert learner.clock.seconds()["compute"] == pytest.approx(4.0)  # serial step cost, whole: phases have none of their own
        assert learner.clock.seconds()["optimizer"] == 0.0
        return learner

    learner = on_logical_loop(work)
    m, reports = learner.metrics, learner.scheduler.reports
    assert waiting == [1, 1, 1, 0] and m.value("segue_queue_depth", queue="prefetch") == 0
    assert m.value("segue_learner_steps_total") == 4
    assert m.value("segue_trained_tokens_total") == sum(sum(r.ages) for r in reports)
    assert m.value("segue_token_staleness_versions") == sum(sum(r.ages) for r in reports)
    assert m.sum("segue_token_staleness_versions") == sum(r.ages[1] for r in reports if len(r.ages) > 1)
    assert m.value("segue_entropy_nats") == pytest.approx(reports[-1].stats["entropy"])
    assert m.value("segue_grad_norm") == pytest.approx(reports[-1].stats["grad_norm"])
    assert m.value("segue_reward_mean", env="latency") == reports[-1].stats["reward_mean"]
    assert m.value("segue_policy_version") == 4
    for phase in ("wait_batch", "prepare", "proximal", "forward_backward", "optimizer"):
        assert m.value("segue_learner_step_seconds", phase=phase) == 4
    assert m.value("segue_learner_step_seconds", phase="publish") == 5
    assert m.value("segue_learner_step_seconds", phase="checkpoint") == 2
    assert {"forward_backward_seconds", "optimizer_seconds"} <= set(reports[0].stats)


def test_two_serial_runs_agree(tmp_path: Path, model: Path) -> None:
    def once(name: str) -> list[dict[str, float]]:
        async def work() -> Learner:
            learner = Learner(tmp_path / name, model, batch_of_step)
            await learner.run()
            return learner

        return [_without_seconds(report) for report in on_logical_loop(work).scheduler.reports]

    assert once("a") == once("b")


def test_a_resumed_run_repeats_what_was_not_committed_and_goes_on_the_same(tmp_path: Path, model: Path) -> None:
    async def whole() -> Learner:
        learner = Learner(tmp_path / "a", model, batch_of_step)
        await learner.run()
        return learner

    first = on_logical_loop(whole)
    resume = tmp_path / "a" / "checkpoints" / "step_2"

    async def resumed() -> Learner:
        learner = Learner(tmp_path / "b", model, batch_of_step, resume=resume)
        learner.scheduler.trained = 2
        await learner.run()
        return learner

    second = on_logical_loop(resumed)
    assert second.scheduler.heard[0] == ("publish", 2)  # resuming publishes weights first
    assert [r.step for r in second.scheduler.reports] == [2, 3]
    gap = "logprob_gap_"  # versions are numbered anew here, so that other tokens are comparable
    for mine, theirs in zip(second.scheduler.reports, first.scheduler.reports[2:], strict=True):
        want = {k: v for k, v in _without_seconds(theirs).items() if not k.startswith(gap)}
        assert {k: v for k, v in _without_seconds(mine).items() if not k.startswith(gap)} == want
    for name, tensor in first.sender.published[4].items():
        assert torch.equal(second.sender.published[4][name], tensor)


def test_stopping_while_waiting_saves_what_was_trained(tmp_path: Path, model: Path) -> None:
    async def work() -> Learner:
        learner = Learner(tmp_path, model, lambda step: batch_of_step(step) if step < 3 else None)
        await learner.shell.start()
        running = asyncio.create_task(learner.shell.run())
        await asyncio.sleep(100.0)  # logical seconds: three steps of one each, and a long wait for the fourth batch
        assert learner.scheduler.trained == 3 and not running.done()
        await learner.shell.stop()
        await running
        await learner.shell.stop()  # idempotent
        return learner

    learner = on_logical_loop(work)
    assert RunDir(tmp_path).latest_checkpoint().path.name == "step_3"
    assert open_checkpoint(RunDir(tmp_path).latest_checkpoint().path).cut() == b"cut of 2"
    assert [r.step for r in learner.scheduler.reports] == [0, 1, 2]
    assert learner.scheduler.heard[-1] == ("committed", 3)
    assert learner.sender.closed


def test_stopping_during_a_step_finishes_it_first(tmp_path: Path, model: Path) -> None:
    async def work() -> Learner:
        learner = Learner(tmp_path, model, batch_of_step)
        stops: list[asyncio.Task[None]] = []

        def stop(step: int) -> None:
            if step == 0 and not stops:
                stops.append(asyncio.get_running_loop().create_task(learner.shell.stop()))

        learner.scheduler.on_trained = stop
        await learner.run()
        await stops[0]
        return learner

    learner = on_logical_loop(work)
    assert [r.step for r in learner.scheduler.reports] == [0]
    assert [folder.path.name for folder in RunDir(tmp_path).complete_checkpoints()] == ["step_1"]


def test_stopping_before_anything_was_trained_writes_nothing(tmp_path: Path, model: Path) -> None:
    async def work() -> Learner:
        learner = Learner(tmp_path, model, batch_of_step)
        await learner.shell.start()
        await learner.shell.stop()
        await learner.shell.run()
        return learner

    assert on_logical_loop(work).scheduler.reports == []
    assert RunDir(tmp_path).complete_checkpoints() == []


def test_the_scheduler_can_end_the_run(tmp_path: Path, model: Path) -> None:
    async def work() -> Learner:
        learner = Learner(tmp_path, model, lambda step: batch_of_step(step) if step == 0 else None)
        learner.scheduler.on_trained = lambda step: learner.scheduler.end("interrupted")
        await learner.run()
        return learner

    on_logical_loop(work)
    assert RunDir(tmp_path).latest_checkpoint().path.name == "step_1"


def _failure(tmp_path: Path, model: Path, prepare: Any = None, batches: Any = batch_of_step) -> tuple[RunFailed, Learner]:
    async def work() -> tuple[RunFailed, Learner]:
        learner = Learner(tmp_path, model, batches)
        if prepare is not None:
            prepare(learner)
        with pytest.raises(RunFailed) as error:
            await learner.run()
        return error.value, learner

    return on_logical_loop(work)


def test_no_batch_by_the_deadline_names_the_producers(tmp_path: Path, model: Path) -> None:
    failure, _ = _failure(tmp_path, model, batches=lambda step: None)
    assert failure.part == "scheduler"
    assert failure.sentence == (
        'The learner waited 600 s for the batch of step 0 and none came; the scheduler reports {"episodes": {"leased": 5}}.'
    )


def test_groups_that_nobody_may_train_are_what_the_sentence_is_about() -> None:
    """Budgets so small that every episode is cut off: the groups are dropped, and no batch is ever formed."""
    assert produced(
        {"counts": {"groups_dropped": {"group_failed": 3}, "finished": {"latency|truncated_tokens": 11, "latency|terminated": 1}}}
    ) == (
        "dropped 3 groups (group_failed 3) of 12 finished episodes (latency|terminated 1, latency|truncated_tokens 11): "
        "group.min_valid and learner.mask_outcomes say which are trained"
    )


def test_the_deadline_counts_waiting_and_not_training(tmp_path: Path, model: Path) -> None:
    """A step longer than the deadline is no wait; the next batch is asked for meanwhile."""

    async def work() -> Learner:
        config = learner_config(steps=2, learner={"batch_wait_seconds": 5.0}, serial={"learner_step_seconds": 500.0})
        learner = Learner(tmp_path, model, batch_of_step, config)
        await learner.run()
        return learner

    assert len(on_logical_loop(work).scheduler.reports) == 2


@pytest.mark.parametrize("limit", [3.0, 300.0])
def test_an_evaluation_before_training_is_no_wait_for_a_batch(tmp_path: Path, model: Path, limit: float) -> None:
    """It has a deadline of its own, eval.deadline_seconds, which may be longer."""

    async def work() -> tuple[RunFailed, float]:
        config = learner_config(steps=2, learner={"batch_wait_seconds": limit})
        learner = Learner(tmp_path, model, lambda step: None, config)
        learner.scheduler.opened_at = 5000.0
        with pytest.raises(RunFailed) as error:
            await learner.run()
        return error.value, asyncio.get_running_loop().time()

    failure, ended = on_logical_loop(work)
    assert f"waited {limit:g} s for the batch of step 0" in failure.sentence
    assert 5000.0 <= ended <= 5000.0 + limit + 30.0


def test_a_dead_scheduler_ends_the_run(tmp_path: Path, model: Path) -> None:
    def die(learner: Learner) -> None:
        def lose(step: int) -> None:
            learner.scheduler.lost = PeerLost("scheduler-0 is gone (ActorDiedError)")

        learner.scheduler.on_trained = lose

    failure, learner = _failure(tmp_path, model, die)
    assert failure.part == "scheduler" and "scheduler-0 is gone" in failure.sentence
    assert learner.metrics.value("segue_rpc_failures_total", reason="lost") >= 1


def test_calls_that_time_out_are_repeated_and_counted(tmp_path: Path, model: Path) -> None:
    async def work() -> Learner:
        learner = Learner(tmp_path, model, batch_of_step)
        learner.scheduler.time_outs = {"trained": 2, "take_batch": 1, "publish": 1}
        await learner.run()
        return learner

    learner = on_logical_loop(work)
    assert len(learner.scheduler.reports) == 4
    assert learner.metrics.value("segue_rpc_failures_total", reason="timeout") == 4


def test_a_silent_scheduler_ends_the_run(tmp_path: Path, model: Path) -> None:
    failure, _ = _failure(tmp_path, model, lambda learner: learner.scheduler.time_outs.update({"trained": 3}))
    assert failure.part == "scheduler" and "did not answer trained" in failure.sentence


def test_a_batch_that_must_not_be_trained_ends_the_run_with_its_reason(tmp_path: Path, model: Path) -> None:
    def broken(step: int) -> Batch:
        return msgspec.structs.replace(batch_of_step(step), version_steps={})

    failure, _ = _failure(tmp_path, model, batches=broken)
    assert failure.part == "learner-0"
    assert failure.sentence.startswith("A batch was refused: episode 0 of group 10: weight version 0 has no step")


def test_divergence_is_a_sentence(tmp_path: Path, model: Path) -> None:
    def spoil(learner: Learner) -> None:
        start = learner.shell.start

        async def then_spoil() -> None:
            await start()
            assert learner.shell._trainer is not None
            with torch.no_grad():
                next(iter(learner.shell._trainer.policy.parameters())).fill_(float("nan"))

        learner.shell.start = then_spoil  # type: ignore[method-assign]

    failure, _ = _failure(tmp_path, model, spoil)
    assert "Training diverged: the gradient norm of step 0 is nan; lower learner.lr" in failure.sentence


def test_weights_are_sent_in_the_background_once_per_transfer(tmp_path: Path, model: Path) -> None:
    async def work() -> Learner:
        learner = Learner(tmp_path, model, batch_of_step)
        await learner.shell.start()
        await learner.ask_to_send(7)
        await learner.ask_to_send(7)  # a repeated call
        await asyncio.sleep(0)
        assert [t.transfer for t in learner.sender.sent] == [7] and learner.scheduler.transfers == []
        await learner.shell.run()  # training does not wait for the broadcast
        assert learner.scheduler.transfers == []
        learner.sender.go.set()
        await learner.scheduler.transferred.wait()
        await learner.shell.stop()
        return learner

    learner = on_logical_loop(work)
    assert [(r.transfer, r.ok) for r in learner.scheduler.transfers] == [(7, True)]


def test_a_transfer_that_breaks_ends_the_run(tmp_path: Path, model: Path) -> None:
    async def work() -> None:
        learner = Learner(tmp_path, model, lambda step: None)

        async def break_down(transfer: Any) -> Any:
            raise RunFailed("learner-0", "The weight sender broke.")

        learner.sender.send = break_down  # type: ignore[method-assign]
        await learner.shell.start()
        running = asyncio.create_task(learner.shell.run())
        await asyncio.sleep(1.0)
        await learner.ask_to_send(0)
        with pytest.raises(RunFailed, match="weight sender broke"):
            await running

    on_logical_loop(work)


def test_one_trajectory_per_step_is_written_for_reading(tmp_path: Path, model: Path) -> None:
    async def work() -> None:
        config = learner_config(steps=4, rollout={"keep_trajectories": 3})
        await Learner(tmp_path, model, batch_of_step, config).run()

    on_logical_loop(work)
    files = sorted((tmp_path / "trajectories").iterdir())
    assert [f.name for f in files] == ["learner-0-000001.json", "learner-0-000002.json", "learner-0-000003.json"]
    told = json.loads(files[-1].read_text())
    assert told["step"] == 3 and told["outcome"] == "terminated"
    assert sum(segment["tokens"] for segment in told["segments"]) == sum(len(s["ids"]) for s in told["segments"])
    assert any(segment.get("sampled") for segment in told["segments"] if segment["author"] == "assistant")


def test_trajectories_are_decoded_where_there_is_a_tokenizer(tmp_path: Path, model: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0")).save(str(model / "tokenizer.json"))

    async def work() -> None:
        await Learner(tmp_path, model, batch_of_step, learner_config(steps=1)).run()

    on_logical_loop(work)
    (path,) = (tmp_path / "trajectories").iterdir()
    segment = json.loads(path.read_text())["segments"][0]
    assert segment["author"] == "user" and segment["text"].startswith("w")


def test_the_tokenizer_outlives_the_checkpoint_it_was_resumed_from(tmp_path: Path, model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")

    def run(steps: int, resume: Path | None) -> None:
        async def work() -> None:
            config = learner_config(steps=steps, checkpoint={"every": 1, "keep": 1})
            learner = Learner(tmp_path, model, batch_of_step, config, resume)
            learner.scheduler.trained = 1 if resume else 0
            await learner.run()

        on_logical_loop(work)

    run(1, None)
    run(4, RunDir(tmp_path).latest_checkpoint().path)
    assert [folder.path.name for folder in RunDir(tmp_path).complete_checkpoints()] == ["step_4"]
    assert (model_folder(RunDir(tmp_path).latest_checkpoint().path) / "tokenizer.json").read_text() == "{}"


def test_a_path_that_is_no_model_is_a_sentence(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(UserError, match="There is no model folder"):
            await Learner(tmp_path, tmp_path / "nowhere", batch_of_step).run()

    on_logical_loop(work)


async def test_with_a_thread_and_prefetching_the_run_is_the_same(tmp_path: Path, model: Path) -> None:
    """The production set-up on a real loop: training in a thread, the next batch prepared in another."""
    learner = Learner(tmp_path / "thread", model, batch_of_step, compute=ThreadCompute("learner"), prefetch=True)
    await learner.run()
    await learner.shell.stop()

    def serial() -> list[dict[str, float]]:
        async def work() -> Learner:
            serial = Learner(tmp_path / "serial", model, batch_of_step)
            await serial.run()
            return serial

        return [_without_seconds(report) for report in on_logical_loop(work).scheduler.reports]

    expected = await asyncio.get_running_loop().run_in_executor(None, serial)
    assert [_without_seconds(report) for report in learner.scheduler.reports] == expected
