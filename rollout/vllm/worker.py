"""The engine's part of what is mixed into vLLM's workers (`worker_extension_cls`): sampling with noise of our own, and loading
weights that lie in the node's process.

vLLM seeds a generator per request and draws from it token by token, so that a request that goes on after an interruption would
start the noise anew. Here the generator of each row is seeded before each token (`noise.generator_seed`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rollout.vllm.handover import open_tensors
from rollout.vllm.lifeline import end_with_parent
from rollout.vllm.noise import generator_seed
from rollout.vllm.record import EXTRA

Sampled = tuple[torch.Tensor, torch.Tensor | None]


class RowNoise:
    """Stands before vLLM's random sampler. `runner` is vLLM's model runner: its batch says whose row is which.

    `extra_args` of a request: {"seed", "offset"}: its noise; or {"force"}: the tokens to be taken, whatever is likely.
    """

    def __init__(self, runner: Any, sample: Callable[..., Sampled]) -> None:
        self._runner = runner
        self._sample = sample
        self._generators: list[torch.Generator] = []

    def __call__(
        self, logits: torch.Tensor, generators: dict[int, torch.Generator], k: torch.Tensor | None, p: torch.Tensor | None
    ) -> Sampled:
        forced: list[tuple[int, int]] = []
        seeded = dict(generators)
        requests, rows = self._runner.requests, self._runner.input_batch.req_ids
        for row, name in enumerate(rows[: logits.shape[0]]):
            request = requests[name]
            extra = (request.sampling_params.extra_args or {}).get(EXTRA)
            if extra is None:
                continue
            number = len(request.output_token_ids)
            if "force" in extra:
                forced.append((row, extra["force"][min(number, len(extra["force"]) - 1)]))
            else:
                seeded[row] = self._generator(row, logits.device)
                seeded[row].manual_seed(generator_seed(extra["seed"], extra["offset"] + number))
        tokens, logprobs = self._sample(logits, seeded, k, p)
        for row, token in forced:
            tokens[row] = token
        return tokens, logprobs

    def _generator(self, row: int, device: torch.device) -> torch.Generator:
        while len(self._generators) <= row:
            self._generators.append(torch.Generator(device=device))
        return self._generators[row]


class Extension:
    """Methods that the node calls by `collective_rpc`. `segue.cluster.vllm_worker` adds the backend that weights come by."""

    model_runner: Any

    def segue_install(self) -> str:
        """Put `RowNoise` in place, and tie this process to its parent. Returns "" or why it cannot be done."""
        end_with_parent()
        runner = self.model_runner
        sampler = getattr(getattr(runner, "sampler", None), "topk_topp_sampler", None)
        if sampler is None or not hasattr(runner, "input_batch") or not hasattr(runner, "requests"):
            return f"its model runner ({type(runner).__module__}) has another sampler than the one that is known here"
        if not isinstance(sampler.forward, RowNoise):
            sampler.forward = RowNoise(runner, sampler.forward)
        return ""

    def segue_load_handover(self, path: str, size: int, plan: list[list[Any]]) -> None:
        """Load tensors that the node hands over in memory (`handover.py`), inside the bracket of a weight update.

        They are views of a mapping that lives as long as any loader holds one of them.
        """
        self.model_runner.get_model().load_weights(open_tensors(path, size, plan))
