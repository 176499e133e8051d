"""A vLLM engine from what the config says: arguments, environment, KV memory. The one place that decides vLLM's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import psutil

from rollout.model_config import meta_model
from rollout.vllm.arguments import check_arguments
from rollout.vllm.environment import set_environment
from rollout.vllm.expected import HEAD_SIZES_ON_CPU, head_size, kv_bytes_per_token, open_config
from rollout.vllm.memory import check_memory, weight_bytes
from rollout.vllm.record import SETTINGS
from segue.config.rollout import PARALLEL
from segue.errors import UserError

if TYPE_CHECKING:
    from rollout.vllm.engine import VllmEngine

BLOCK_ON_CPU = 32
"""vLLM's CPU attention wants multiples of 32 tokens; a smaller block wastes less of a prefix."""
ROOM = 2
"""By default there is KV for so many times `rollout.slots` full contexts: those that wait for their environment keep theirs."""


def engine_arguments(
    path: str,
    config: Any,
    *,
    slots: int,
    max_tokens: int,
    score_tokens: int,
    dtype: str,
    device: str,
    seed: int,
    worker_extension: str,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """vLLM's engine arguments: those that Segue needs, defaults for the rest, and over them the user's own (`given`, checked).

    `worker_extension` is the dotted name of a subclass of `rollout.vllm.worker.Extension` whose module registers the
    weight-transfer backend "segue".

    Raises `UserError` for a model or KV memory that cannot work.
    """
    cpu = device == "cpu"
    scheduler = "SyncScheduler" if cpu else "OverlappingScheduler"
    block = int(given.get("block_size") or BLOCK_ON_CPU)
    room = -(-score_tokens // block) + 2  # blocks
    per_token = kv_bytes_per_token(config, dtype)
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": dtype,
        "seed": seed % (1 << 31),
        "max_model_len": max_tokens,
        "max_num_seqs": slots,
        "load_format": "dummy",  # nothing is sampled before the first load
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "scheduling_policy": "priority",
        "scheduler_cls": f"rollout.vllm.scheduler.{scheduler}",
        "worker_extension_cls": worker_extension,
        "weight_transfer_config": {"backend": "segue"},
        "additional_config": {SETTINGS: {"score_tokens": score_tokens}},
    }
    if cpu:
        if head_size(config) not in HEAD_SIZES_ON_CPU:
            raise UserError(
                f"The model in {path} has attention heads of size {head_size(config)}, and vLLM on CPUs runs those of "
                f"{', '.join(map(str, HEAD_SIZES_ON_CPU))}: use another model, or rollout.engine = 'embedded'."
            )
        blocks = ROOM * slots * -(-max_tokens // block) + room
        arguments |= {"enforce_eager": True, "block_size": block, "kv_cache_memory_bytes": blocks * block * per_token}
    if math.prod(int(given.get(name) or 1) for name in PARALLEL) > 1:
        # Left to itself vLLM takes Ray for its workers where it finds itself in a placement group, as nodes on several hosts are.
        arguments["distributed_executor_backend"] = "mp"
    arguments |= given
    memory = arguments.get("kv_cache_memory_bytes")
    least = (-(-max_tokens // block) + room) * block * per_token
    if memory is not None and memory < least:
        raise UserError(
            f"rollout.engine_args.kv_cache_memory_bytes = {memory} does not hold one episode of rollout.max_tokens = "
            f"{max_tokens} and what scoring needs: set it to {least} or more, or lower rollout.max_tokens."
        )
    return arguments


def build_engine(
    path: str,
    *,
    slots: int,
    max_tokens: int,
    score_tokens: int,
    dtype: str,
    device: str,
    worker_extension: str,
    seed: int = 0,
    threads: int = 1,
    tokenizer: Any = None,
    engine_args: Mapping[str, Any] | None = None,
    start_seconds: float = 600.0,
    staged: bool = True,
) -> VllmEngine:
    """An engine that is ready to be started. `score_tokens`: of the longest sequence that is ever scored; `worker_extension`: see
    `engine_arguments`; `staged`: new weights wait beside those that run. Raises `UserError`."""
    given = dict(engine_args or {})
    check_arguments(given)
    config = open_config(path, max_tokens)
    arguments = engine_arguments(
        path,
        config,
        slots=slots,
        max_tokens=max_tokens,
        score_tokens=score_tokens,
        dtype=dtype,
        device=device,
        seed=seed,
        worker_extension=worker_extension,
        given=given,
    )
    model = meta_model(config, dtype)
    if device == "cpu":
        total = psutil.virtual_memory().total
        kv = int(arguments["kv_cache_memory_bytes"])
        check_memory(path, weights=weight_bytes(model), kv=kv, total=total, staged=staged)
    set_environment(device, threads)
    from rollout.vllm.core import Core  # only now: vLLM reads its environment when it is imported
    from rollout.vllm.engine import VllmEngine

    return VllmEngine(
        Core(arguments, start_seconds),
        model,
        slots=slots,
        max_tokens=max_tokens,
        score_tokens=score_tokens,
        tokenizer=tokenizer,
    )
