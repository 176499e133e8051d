"""The run's probe: a fixed sequence that every published version is scored on, so that engines can prove what they run.

The sequence depends on seed, vocabulary and length alone: it is the same in every version, after a resume, and on every rank.
Its tokens are spread over the vocabulary rather than likely, because each of them reads an embedding row of its own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from learner.model import PackedModel
from learner.packing import pack
from segue.errors import UserError
from segue.ports.weights import Probe

_STREAM = 0x70726F6265
"""Sets the probe's random numbers apart from all others of the run's seed."""


def draw_probe(vocabulary: int, special: Collection[int], count: int, seed: int) -> list[int]:
    """`count` ids of [0, vocabulary) without `special` ones, in random order; none comes twice before all have come once.

    Raises `UserError` where nothing but special ids is left.
    """
    usable = [token for token in range(vocabulary) if token not in set(special)]
    if not usable:
        raise UserError("The model's vocabulary has no ordinary token to probe with: set weightsync.probe_tokens = 0.")
    return [int(token) for token in np.resize(np.random.default_rng([_STREAM, seed]).permutation(usable), count)]


def vocabulary_of(model: PackedModel, tokenizer: Mapping[str, bytes]) -> tuple[int, set[int]]:
    """How many ids both the model and its tokenizer know, and which of them are special.

    Special are the ids that the model's configs name (`eos_token_id` and the like) and the special tokens of tokenizer.json, for
    an engine may treat them specially: stop at them, or want an image in their place. Raises `UserError` where tokenizer.json is
    broken.
    """
    vocabulary = model.lm.get_input_embeddings().num_embeddings
    special: set[int] = set()
    for config in (model.lm.config, model.lm.config.get_text_config(), model.lm.generation_config):
        for name, value in config.to_dict().items() if config is not None else ():
            if name.endswith(("_token_id", "_token_index")):
                special.update(_ids(value))
    content = tokenizer.get("tokenizer.json")
    if content is None:
        return vocabulary, special
    try:
        known = json.loads(content)
        special.update(int(token["id"]) for token in known.get("added_tokens", []) if token["special"])
        return min(vocabulary, _size(known) or vocabulary), special
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"The model's tokenizer.json cannot be read ({type(error).__name__}: {error}): restore it.") from None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]


def _size(tokenizer: Mapping[str, Any]) -> int:
    """One more than the greatest id in a tokenizer.json; 0 if it does not list its ids."""
    words = tokenizer.get("model", {}).get("vocab", {})
    ids = list(words.values()) if isinstance(words, dict) else list(range(len(words)))
    ids += [int(token["id"]) for token in tokenizer.get("added_tokens", [])]
    return max(ids, default=-1) + 1


@torch.no_grad()
def score_probe(model: PackedModel, tokens: list[int]) -> Probe:
    """The probe with its log-probabilities (nats, float32, temperature 1) under the model's present weights.

    One forward pass. A collective when the model is sharded: all ranks call it, at the same place among their collectives.
    """
    sampled = np.arange(len(tokens)) > 0
    row = pack([0], [np.array(tokens)], [sampled])
    logprobs, _ = model(row.to(model.device))
    if isinstance(model, FSDPModule):
        model.reshard()  # a forward pass without backward leaves the root gathered
    return Probe(tokens, logprobs.tolist())
