"""`rollout.engine_args`: vLLM's engine arguments as a user gives them, checked without importing vLLM (which takes seconds)."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from segue.errors import UserError

OWNED = {
    "model": "set model.path",
    "tokenizer": "set model.path",
    "dtype": "set rollout.dtype",
    "max_model_len": "set rollout.max_tokens",
    "max_num_seqs": "set rollout.slots",
    "data_parallel_size": "raise rollout.nodes, each of which is an engine",
    "seed": "set seed",
    **dict.fromkeys(
        (
            "scheduler_cls",
            "scheduling_policy",
            "worker_extension_cls",
            "weight_transfer_config",
            "additional_config",
            "logprobs_mode",
            "enable_prefix_caching",
            "skip_tokenizer_init",
            "speculative_config",
            "kv_transfer_config",
            "kv_offloading_size",
            "kv_offloading_backend",
            "disable_log_stats",
        ),
        "leave it out: Segue needs it as it is",
    ),
}
"""Arguments that are not the user's to set, and what to do instead."""

MISSING = (
    "rollout.engine = 'vllm', but vLLM is not installed: run SEGUE_VLLM=1 ./launch.sh (on a GPU machine it is always installed), "
    "or set rollout.engine = 'embedded'."
)


@cache
def known_arguments() -> frozenset[str] | None:
    """The names vLLM's `AsyncEngineArgs` takes, read from its source; None without vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    source = (Path(spec.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    classes = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name in ("EngineArgs", "AsyncEngineArgs")]
    fields = (n for c in classes for n in c.body if isinstance(n, ast.AnnAssign))
    return frozenset(n.target.id for n in fields if isinstance(n.target, ast.Name))


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises `UserError` where vLLM is missing, and for arguments that are unknown or not the user's to set."""
    known = known_arguments()
    if known is None:
        raise UserError(MISSING)
    for name in arguments:
        if name in OWNED:
            raise UserError(f"rollout.engine_args.{name} cannot be set: {OWNED[name]}.")
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known - OWNED.keys()), n=1)
            remedy = f"did you mean rollout.engine_args.{near[0]}?" if near else "leave it out."
            raise UserError(f"rollout.engine_args.{name} is no engine argument of vLLM: {remedy}")
