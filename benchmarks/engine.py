"""The embedded engine against a hand-written Hugging Face decode loop: same model, same contexts, one thread, one core.

    python -m benchmarks.engine [--json FILE] [--pairs 9] [--sequences 32] …

Each pair runs both arms one after the other, the first one alternating, and gives one ratio of tokens per second; the median
counts. The baseline is the fastest plain loop that samples the same way: one prefill of contexts of equal length (nothing is
padded), then one forward pass per token with a `DynamicCache`, log-softmax, inverse-CDF sampling, log-probabilities, and token
ids taken to Python. The engine gets the same contexts as so many requests from as many consumers, through its asyncio front, its
thread and its chunks. Both are timed from contexts to the last token id. The process is pinned to one core.

Another figure, `churn_ratio_to_hf`, is about what the loop cannot do at all: more episodes than slots, each in short turns of
random length with an observation between them, so that sequences join and leave all the time. It compares the engine's tokens per
second there with the loop's on its full batch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from benchmarks.command import Parser, ended, json_file, positive
from benchmarks.result import document, machine, write
from rollout.embedded import EmbeddedEngine
from rollout.embedded.sampler import sample, stream_of, uniform
from segue.clock import ThreadCompute
from segue.ports.engine import GenerateRequest, PauseMode
from segue.ports.weights import Manifest, TensorSpec


class Weights:
    """The model's own weights, staged."""

    version = 0

    def __init__(self, model: Any) -> None:
        self._tensors = {name: p.data for name, p in model.named_parameters()}
        specs = [TensorSpec(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in self._tensors.items()]
        self.manifest = Manifest("full", "benchmark", 0, 0, specs, [list(range(len(specs)))], [0])

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors


def build(args: argparse.Namespace, folder: str) -> Any:
    """A random Llama of the quickstart's size, saved for the engine and opened for the loop."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // args.head_size,
        num_key_value_heads=args.kv_heads or args.hidden // args.head_size,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model


def capacity(args: argparse.Namespace) -> int:
    """Tokens a slot must hold: context, sampled tokens, and at most as many of observations in `churn` (it cuts turns to fit)."""
    most: int = args.context + 3 * args.new + 64
    return most


def contexts(args: argparse.Namespace, pair: int) -> list[list[int]]:
    """Different ones for every pair, so that nothing is cached."""
    generator = torch.Generator().manual_seed(args.seed + 1000 * pair + 1)
    shape = (args.sequences, args.context)
    tokens: list[list[int]] = torch.randint(0, args.vocabulary, shape, generator=generator).tolist()
    return tokens


@torch.inference_mode()
def plain_loop(model: Any, prompts: list[list[int]], new: int, seeds: list[int]) -> tuple[list[list[int]], list[list[float]]]:
    """The baseline: sampled tokens and their log-probabilities, per sequence."""
    cache = DynamicCache(config=model.config)
    streams = [stream_of(seed) for seed in seeds]
    noise = torch.tensor([[uniform(stream, number) for number in range(new)] for stream in streams], dtype=torch.float64)
    logits = model(torch.tensor(prompts), past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    for step in range(new):
        chosen, chances = sample(logits, None, None, noise[:, step])
        for row, (token, chance) in enumerate(zip(chosen.tolist(), chances.tolist(), strict=True)):
            tokens[row].append(token)
            logprobs[row].append(chance)
        if step + 1 < new:
            logits = model(chosen[:, None], past_key_values=cache, use_cache=True).logits[:, -1]
    return tokens, logprobs


_ids = iter(range(10**9))


def request(tokens: list[int], new: int, seed: int, **options: Any) -> GenerateRequest:
    number = next(_ids)
    fields: dict[str, Any] = {"episode": number, "group": number, "priority": 0, "offset": 0, **options}
    return GenerateRequest(
        id=str(number),
        tokens=tokens,
        max_tokens=new,
        temperature=1.0,
        stop_tokens=(),
        stop_strings=(),
        seed=seed,
        lineage=0,
        **fields,
    )


async def ask(engine: EmbeddedEngine, wanted: GenerateRequest) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    async for chunk in engine.generate(wanted):
        tokens += chunk.tokens
        logprobs += chunk.logprobs
    return tokens, logprobs


async def engine_batch(
    engine: EmbeddedEngine, prompts: list[list[int]], new: int, seeds: list[int]
) -> list[tuple[list[int], list[float]]]:
    """The engine's arm."""
    requests = [request(tokens, new, seed) for tokens, seed in zip(prompts, seeds, strict=True)]
    answers = await asyncio.gather(*[ask(engine, wanted) for wanted in requests])
    for wanted in requests:
        engine.forget(wanted.episode)
    return list(answers)


async def churn(engine: EmbeddedEngine, args: argparse.Namespace, pair: int) -> tuple[int, float]:
    """Three episodes per slot, in groups of 8, each in turns until it has `new` tokens: (tokens, seconds)."""
    generator = torch.Generator().manual_seed(args.seed + 1000 * pair + 2)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    episodes = 3 * args.sequences
    prompts = [torch.randint(0, args.vocabulary, (args.context,), generator=generator).tolist() for _ in range(-(-episodes // 8))]
    plans = []
    for _ in range(episodes):
        turns, left = [], args.new
        while left > 0:
            turns.append(
                (min(left, draw(4, 24)), torch.randint(0, args.vocabulary, (draw(2, 12),), generator=generator).tolist())
            )
            left -= turns[-1][0]
        plans.append(turns)

    async def episode(number: int) -> None:
        tokens, offset = list(prompts[number // 8]), 0
        key = 10_000_000 + pair * 1000 + number
        for new, observation in plans[number]:
            new = min(new, capacity(args) - len(tokens) - len(observation) - 1)
            got, _ = await ask(
                engine, request(tokens, new, key, episode=key, group=number // 8, priority=number // 8, offset=offset)
            )
            tokens += got + observation
            offset += new
        engine.forget(key)

    before = engine.counts().decode_tokens
    started = time.perf_counter()
    await asyncio.gather(*[episode(number) for number in range(episodes)])
    return engine.counts().decode_tokens - before, time.perf_counter() - started


async def measure(args: argparse.Namespace, model: Any, folder: str) -> dict[str, Any]:
    compute = ThreadCompute("engine")
    engine = EmbeddedEngine(
        folder, slots=args.sequences, max_tokens=capacity(args), dtype="float32", device="cpu", compute=compute
    )
    await engine.start()
    await engine.pause(PauseMode.ABORT, 1)
    await engine.load(0, Weights(model))
    await engine.resume(1)
    total = args.sequences * args.new
    pairs: list[dict[str, float]] = []
    gap, equal = 0.0, 0
    for pair in range(-1, args.pairs):  # the first one warms up
        prompts, seeds = contexts(args, pair), [args.seed + 100 * pair + i for i in range(args.sequences)]
        seconds: dict[str, float] = {}
        cpu: dict[str, float] = {}
        for arm in ("engine", "hf") if pair % 2 else ("hf", "engine"):
            started, worked = time.perf_counter(), time.process_time()
            if arm == "engine":
                ours = await engine_batch(engine, prompts, args.new, seeds)
            else:
                theirs = plain_loop(model, prompts, args.new, seeds)
            seconds[arm], cpu[arm] = time.perf_counter() - started, time.process_time() - worked
        worked = time.process_time()
        joined, took = await churn(engine, args, pair)
        cpu["churn"] = time.process_time() - worked
        if pair < 0:
            continue
        for (tokens, logprobs), their_tokens, their_logprobs in zip(ours, *theirs, strict=True):
            same = next((i for i, (a, b) in enumerate(zip(tokens, their_tokens, strict=True)) if a != b), args.new)
            equal += same
            gap = max([gap, *[abs(a - b) for a, b in zip(logprobs[:same], their_logprobs[:same], strict=True)]])
        pairs.append(
            {
                "engine_tokens_per_second": total / seconds["engine"],
                "hf_tokens_per_second": total / seconds["hf"],
                "ratio": seconds["hf"] / seconds["engine"],
                "cpu_ratio": cpu["hf"] / cpu["engine"],
                "churn_tokens_per_second": joined / took,
                "churn_ratio": joined / took * seconds["hf"] / total,
                "churn_cpu_ratio": joined / cpu["churn"] * cpu["hf"] / total,
            }
        )
        print(
            f"pair {pair}: engine {total / seconds['engine']:7.0f} tokens/s, loop {total / seconds['hf']:7.0f}, "
            f"ratio {pairs[-1]['ratio']:.3f} (CPU {pairs[-1]['cpu_ratio']:.3f}); "
            f"churn {joined / took:7.0f}, ratio {pairs[-1]['churn_ratio']:.3f} (CPU {pairs[-1]['churn_cpu_ratio']:.3f})",
            flush=True,
        )
    await engine.stop()
    compute.close()
    ratios = [p["ratio"] for p in pairs]
    return {
        "ratio_to_hf": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "cpu_ratio_to_hf": statistics.median(p["cpu_ratio"] for p in pairs),
        "churn_ratio_to_hf": statistics.median(p["churn_ratio"] for p in pairs),
        "equal_tokens_share": equal / (total * len(pairs)),
        "logprob_gap_max": gap,
        "pairs": pairs,
    }


def main() -> None:
    parser = Parser("engine", __doc__)
    parser.add_argument("--json", type=json_file, help="write the figures here")
    parser.add_argument("--pairs", type=positive, default=9)
    parser.add_argument("--sequences", type=positive, default=32)
    parser.add_argument("--context", type=positive, default=100, help="tokens of context at the start")
    parser.add_argument("--new", type=positive, default=128, help="tokens sampled per sequence")
    parser.add_argument("--hidden", type=positive, default=160)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=0, help="0: as many as heads")
    parser.add_argument("--vocabulary", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    where = machine()
    if hasattr(os, "sched_setaffinity"):
        core = max(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        where["pinned_to_core"] = core
    with tempfile.TemporaryDirectory() as folder:
        model = build(args, folder)
        result = asyncio.run(measure(args, model, folder))
    result["parameters"] = sum(p.numel() for p in model.parameters())
    print(
        f"median ratio to the Hugging Face loop: {result['ratio_to_hf']:.3f} (in CPU seconds {result['cpu_ratio_to_hf']:.3f}), "
        f"with joins and leaves {result['churn_ratio_to_hf']:.3f}"
    )
    told = {key: value for key, value in vars(args).items() if key != "json"}
    write(
        args.json, document("engine", result, seeds=[args.seed], arguments=told, packages=("torch", "transformers"), where=where)
    )


if __name__ == "__main__":
    sys.exit(ended(main))
