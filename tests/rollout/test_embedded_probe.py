"""What the probe sees: an engine whose loader went wrong, on real weights. F37, F40: nothing else in the engine would notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import chat_tokenizers as made
import pytest
import torch
from engine_models import Staged, named, probe_of, prompt, save, tiny
from fake_engine import FakeReceiver
from node_world import Node, World, config, run

from rollout.embedded import EmbeddedEngine
from rollout.embedded.cache import SLOTS
from rollout.embedded.runner import Runner
from rollout.fitting import Bindings, bind
from rollout.probe import largest_gap
from segue.clock import LogicalCompute
from segue.episode import Task
from segue.ports.engine import EngineDead
from segue.ports.rollout import Loaded, LoadFailed
from segue.ports.transfer import Transfer
from segue.ports.weights import StagedWeights

torch.set_num_threads(1)
VOCAB = len(made.words())
PROBE = prompt(7, 64)
MODES = ["recompute", "keep", "turn", "episode"]
Binder = Callable[[Any, StagedWeights], Bindings]


@cache
def model_of(version: int, tied: bool = False) -> Any:
    return tiny(version, vocab_size=VOCAB, tie_word_embeddings=tied)


# --- through the node -----------------------------------------------------------------------------------------------------


def head_left_old(model: Any, weights: StagedWeights) -> Bindings:
    """The loader writes the tied tensor under one of its names, and the head is a tensor of its own meanwhile."""
    bindings = bind(model, weights)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.clone(), requires_grad=False)
    return bindings


def one_forgotten(model: Any, weights: StagedWeights) -> Bindings:
    forgotten = model.model.layers[1].mlp.down_proj.weight
    return [(target, source) for target, source in bind(model, weights) if target.data_ptr() != forgotten.data_ptr()]


def one_element_wrong(model: Any, weights: StagedWeights) -> Bindings:
    bindings = bind(model, weights)
    weights.tensors()["model.layers.0.self_attn.q_proj.weight"][3, 5] += 0.5
    return bindings


def nothing_loaded(model: Any, weights: StagedWeights) -> Bindings:
    return []


class Receiver(FakeReceiver):
    """Stages the weights of a version with their probe."""

    def __init__(self, tied: bool) -> None:
        super().__init__(0.1)
        self.tied = tied

    async def stage(self, transfer: Transfer, rank: int) -> Any:
        await super().stage(transfer, rank)
        model = model_of(transfer.version, self.tied)
        return Staged(transfer.version, named(model), probe=probe_of(model, PROBE))


async def start(w: World, tied: bool, folder: Path) -> Node:
    engine = EmbeddedEngine(
        save(model_of(0, tied), folder),
        slots=3,
        max_tokens=200,
        dtype="float32",
        device="cpu",
        compute=LogicalCompute(),
        tokenizer=made.words(),
        decode_cost=0.01,
    )
    return await w.add_node("rollout-0", engine=engine, receiver=Receiver(tied))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("wrong", "tied"), [(head_left_old, True), (one_forgotten, False), (one_element_wrong, False), (nothing_loaded, False)]
)
def test_a_loader_that_went_wrong_is_caught_before_a_token_is_sampled(
    mode: str, wrong: Binder, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A good load, then a bad one amid requests."""

    async def main() -> None:
        cfg = config(update={"inflight": mode}, rollout={"max_tokens": 200, "max_turn_tokens": 30})
        async with World(cfg, nodes=0) as w:
            node = await start(w, tied, tmp_path)
            for episode in range(4):
                await w.lease(episode, task=Task(f"t{episode}", "talk", episode, {"turns": 4}), group=episode)
            await asyncio.sleep(0.1)
            assert isinstance(await w.update(drain_seconds=0.1), Loaded)
            await asyncio.sleep(0.1)
            monkeypatch.setattr("rollout.embedded.control.bind", wrong)
            failed = await w.update(drain_seconds=0.1)
            sampled = node.engine.counts().decode_tokens
            assert isinstance(failed, LoadFailed) and failed.fatal
            assert "rollout-0 does not run the weights of version 3" in failed.reason
            with pytest.raises(EngineDead, match="does not run the weights of version 3"):
                await node.shell.run()
            assert node.engine.counts().decode_tokens == sampled > 0
            assert node.metrics.value("segue_weight_probe_gap_nats") > 1e-3
            for record in w.scheduler.episodes.values():
                assert all(set(body.log.versions.tolist()) <= {-1, 1, 2} for body in record.bodies())

    run(main())


# --- every tensor ---------------------------------------------------------------------------------------------------------


def gap_after(change: Callable[[str, torch.Tensor, torch.Tensor], None], name: str, tied: bool) -> float:
    """The probe's gap of an engine that has the weights of version 1 but for `change(name, its tensor, version 0's)`."""
    model = tiny(1, vocab_size=VOCAB, tie_word_embeddings=tied)
    if tied:  # an engine may keep the two apart
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.clone(), requires_grad=False)
    change(name, model.get_parameter(name).data, model_of(0, tied).get_parameter(name).data)
    model.set_attn_implementation(SLOTS)
    probe = probe_of(model_of(1, tied), PROBE)
    return largest_gap(Runner(model, 1, 64, "cpu").score(PROBE), probe.logprobs)


def not_at_all(name: str, tensor: torch.Tensor, old: torch.Tensor) -> None:
    pass


def stale(name: str, tensor: torch.Tensor, old: torch.Tensor) -> None:
    tensor.copy_(old)


def step_behind(name: str, tensor: torch.Tensor, old: torch.Tensor) -> None:
    """One optimizer step of learning rate 3e-4 (AdamW moves an element by about that much)."""
    generator = torch.Generator().manual_seed(3)
    tensor += 3e-4 * (2 * torch.randint(0, 2, tensor.shape, generator=generator) - 1)


def one_element(name: str, tensor: torch.Tensor, old: torch.Tensor) -> None:
    """Off by one standard deviation of the weights, in the row of a token that the probe has where rows are tokens."""
    row = PROBE[3] if tensor.shape[0] == VOCAB else tensor.shape[0] // 2
    tensor[row] += 0.25 if tensor.ndim == 1 else 0.25 * torch.nn.functional.one_hot(torch.tensor(1), tensor.shape[1])


NAMES = [name for name, _ in model_of(0).named_parameters()]
MATRICES = [name for name in NAMES if "norm" not in name]


@pytest.mark.parametrize("tied", [False, True])
def test_weights_as_published_pass(tied: bool) -> None:
    assert gap_after(not_at_all, "lm_head.weight", tied) < 2e-5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_either_half_of_a_tied_pair_is_seen_when_it_stays_old(name: str, tied: bool) -> None:
    assert gap_after(stale, name, tied) > 1.0


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_element_of_any_tensor_is_seen(name: str) -> None:
    assert gap_after(one_element, name, False) > 1e-3


@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_that_is_one_optimizer_step_behind_is_seen(name: str) -> None:
    assert gap_after(step_behind, name, False) > 1e-3
