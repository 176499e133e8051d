"""The other side of a ceiling: turns recorded and repeated, a sink, and what the two runs of a ceiling are asked for and give."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import Staged, named, save, tiny

from benchmarks import ceilings
from benchmarks.figures import Window
from benchmarks.recorded import RecordingEngine, ReplayEngine, load_turns, record, unknown_share
from benchmarks.watched import Watched
from rollout.embedded import EmbeddedEngine
from segue.clock import ThreadCompute
from segue.config import load_config
from segue.errors import RunFailed
from segue.ports.engine import Chunk, Engine, FinishReason, GenerateRequest, PauseMode

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "balanced.toml"
torch.set_num_threads(1)


def request(seed: int, tokens: list[int], offset: int = 0, limit: int = 6, episode: int = 1, lineage: int = 0) -> GenerateRequest:
    return GenerateRequest(f"{seed}-{offset}", tokens, limit, 1.0, (), (), seed, offset, 0, episode, 0, lineage)


async def answer(engine: Engine, asked: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(asked)]


async def loaded(engine: Engine, version: int) -> Engine:
    await engine.start()
    await engine.pause(PauseMode.ABORT, 1)
    await engine.load(version, Staged(version, named(tiny(0))))
    await engine.resume(1)
    return engine


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    """Two turns of one episode and one of another, recorded by the embedded engine."""
    save(tiny(0), tmp_path / "model")
    compute = ThreadCompute("engine")
    engine = RecordingEngine(
        str(tmp_path / "model"),
        slots=2,
        max_tokens=64,
        dtype="float32",
        device="cpu",
        compute=compute,
        file=tmp_path / "turns" / "rollout-0.turns",
    )
    await loaded(engine, 0)
    for asked in (request(7, [1, 2, 3]), request(7, [1, 2, 3, 4, 5, 6, 7, 8, 9], offset=6), request(8, [1, 2], episode=2)):
        await answer(engine, asked)
    await engine.stop()
    compute.close()
    yield tmp_path / "turns"


async def test_recorded_turns_are_repeated_under_the_weights_that_are_loaded(folder: Path) -> None:
    turns = load_turns(folder)
    assert [(turn.seed, turn.offset, len(turn.tokens)) for turn in turns] == [(7, 0, 6), (7, 6, 6), (8, 0, 6)]
    engine = ReplayEngine(turns, folder / "rollout-0.repeated")
    await loaded(engine, 3)
    [chunk] = await answer(engine, request(7, [1] * 10, offset=6, lineage=3))
    assert (chunk.tokens, chunk.logprobs, chunk.finish) == (turns[1].tokens, turns[1].logprobs, FinishReason.LENGTH)
    assert chunk.spans == [(3, 6)] and chunk.kv_version == 3
    [short] = await answer(engine, request(8, [1, 2], limit=4, episode=2, lineage=3))
    assert short.tokens == turns[2].tokens[:4] and len(short.logprobs) == 4
    assert engine.unknown == 0
    await answer(engine, request(99, [1, 2], episode=3))
    assert engine.unknown == 1
    assert unknown_share(folder) == 0.0, "nothing is said yet"
    await engine.stop()
    assert unknown_share(folder) == pytest.approx(1 / 3)


async def test_what_is_repeated_counts_its_prefill_as_an_engine_that_keeps_kv_until_the_next_weights(folder: Path) -> None:
    engine = ReplayEngine(load_turns(folder))
    await loaded(engine, 0)
    [first] = await answer(engine, request(7, [1] * 10))
    [second] = await answer(engine, request(7, [1] * 20, offset=6))
    assert [(a.context, a.cached, a.prefilled) for a in (*first.admissions, *second.admissions)] == [(9, 0, 9), (19, 15, 4)]
    await engine.load(1, Staged(1, named(tiny(1))))
    [third] = await answer(engine, request(7, [1] * 30, offset=6))
    assert [(a.cached, a.prefilled, a.lost) for a in third.admissions] == [(0, 29, "weight_update")]
    counts = engine.counts()
    assert (counts.prefill_tokens, counts.cached_tokens, counts.decode_tokens) == (9 + 4 + 29, 15, 18)


def test_the_recording_engine_keeps_as_much_kv_as_a_runs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[dict[str, Any]] = []
    monkeypatch.setattr(EmbeddedEngine, "__init__", lambda self, path, **options: built.append(options))
    config = load_config(CONFIG, [])
    record(config, node="rollout-0", model_path="", device="cpu", compute=ThreadCompute("none"), tokenizer=None, folder=tmp_path)
    [options] = built
    assert (options["slots"], options["idle_slots"]) == (config.rollout.slots, config.rollout.idle_slots)
    assert (options["dtype"], options["max_tokens"]) == (config.rollout.dtype, config.rollout.max_tokens)


def test_nothing_recorded_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="No turn was recorded"):
        load_turns(tmp_path)


def test_both_runs_of_a_ceiling_are_the_arms_with_one_side_replaced(tmp_path: Path) -> None:
    config = load_config(CONFIG, [])
    window = ceilings.generation_window(config)
    alone = load_config(CONFIG, ceilings.generation_alone([], window, config, tmp_path))
    fed = load_config(CONFIG, ceilings.training_alone([], tmp_path))
    assert alone.learner.trainer.endswith(":Sink") and alone.rollout.engine.endswith(":record")
    assert alone.staleness.max_age >= alone.steps, "no age bound holds generation back"
    ahead = config.rollout.nodes * config.rollout.max_episodes  # groups at most: each that is open holds a place
    assert alone.steps * alone.batch.groups >= window.last * alone.batch.groups + ahead, "nor do the steps that are left"
    assert fed.rollout.engine.endswith(":replay") and fed.learner.trainer == config.learner.trainer
    for run in (alone, fed):
        assert run.rollout.cores == config.rollout.cores and run.learner.cores == config.learner.cores
        assert (run.batch, run.group, run.rollout.max_episodes) == (config.batch, config.group, config.rollout.max_episodes)
    batch = config.batch.groups * config.group.size
    assert window.warm * batch > config.rollout.max_episodes, "every loop was filled before the window"
    assert (window.last - window.warm) * batch >= 2 * config.rollout.max_episodes


def scraped(seconds: float, tokens: float, nodes: int = 2) -> dict[str, dict[str, float]]:
    state = "segue_worker_state_seconds_total"
    return {f"rollout-{i}": {f'{state}{{state="generate"}}': seconds, "segue_decode_tokens_total": tokens} for i in range(nodes)}


def test_the_rate_of_generation_is_by_the_nodes_own_clocks() -> None:
    watched = Watched([], {}, {2: scraped(10.0, 100.0), 5: scraped(30.0, 700.0)})
    assert ceilings.sampled_rate(watched, Window(2, 5)) == pytest.approx(2 * 600 / 20)
    with pytest.raises(RunFailed, match="sampled nothing"):
        ceilings.sampled_rate(Watched([], {}, {2: scraped(1.0, 0.0), 5: scraped(2.0, 0.0)}), Window(2, 5))


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("steps", [12, 16, 40])
def test_a_run_of_another_bound_takes_as_many_steps_as_the_same_window_needs(bound: int, steps: int) -> None:
    window = Window.of(steps, 4)
    other = Window.of(window.steps(bound), bound)
    assert other.last - other.warm == window.last - window.warm
    assert Window.of(steps, 4).steps(4) == steps
