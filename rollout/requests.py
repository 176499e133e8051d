"""Requests that cannot be served, each a sentence."""

from __future__ import annotations

import math

from segue.errors import UserError
from segue.ports.engine import GenerateRequest

_COLDEST = 1e-3  # below, logits divided by it lose their last digits, and in the end overflow


def check_request(request: GenerateRequest, max_tokens: int, vocabulary: int, stop_strings: bool) -> None:
    """Raises `UserError` for what an engine with slots of `max_tokens`, a model of `vocabulary` ids, and `stop_strings` (it has a
    tokenizer) or not cannot do."""
    n, who = len(request.tokens), f"Request {request.id}"
    if n == 0 or request.max_tokens < 1:
        raise UserError(f"{who} has {n} tokens and max_tokens = {request.max_tokens}: both must be at least 1.")
    if n + request.max_tokens > max_tokens:
        raise UserError(
            f"{who} has {n} tokens of context and may sample {request.max_tokens} more, but a slot holds {max_tokens}: "
            "raise rollout.max_tokens, or ask for fewer."
        )
    if min(request.tokens) < 0 or max(request.tokens) >= vocabulary:
        raise UserError(f"{who} has token ids outside of the model's vocabulary of {vocabulary}: use the model's own tokenizer.")
    if not (request.temperature == 0.0 or _COLDEST <= request.temperature < math.inf):
        raise UserError(f"{who} has temperature {request.temperature}: it must be 0 (greedy) or at least {_COLDEST}.")
    if request.stop_strings and not stop_strings:
        raise UserError(f"{who} has stop strings, but the model folder has no tokenizer: add one, or use stop tokens.")
    if not all(request.stop_strings):
        raise UserError(f"{who} has an empty stop string: leave it out.")


def check_scored(tokens: list[int], max_tokens: int, vocabulary: int) -> None:
    """Raises `UserError` for a sequence that cannot be scored."""
    if not 2 <= len(tokens) <= max_tokens:
        raise UserError(
            f"A sequence of {len(tokens)} tokens cannot be scored: it needs at least 2, and a slot holds {max_tokens} "
            "(rollout.max_tokens)."
        )
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise UserError(
            f"A sequence to score has token ids outside of the model's vocabulary of {vocabulary}: "
            "use one model folder for all roles."
        )
