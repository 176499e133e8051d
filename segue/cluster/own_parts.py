"""Engines of the user's own (`rollout.engine = "module:function"`).

The function is called in each node's process, as

    function(config, node=…, model_path=…, device=…, compute=…, tokenizer=…) -> segue.ports.engine.Engine

with the resolved config, the node's name, the model's folder, torch's name of its device, where blocking work is to run
(`segue.clock.Compute`), and the tokenizer. The engine gets weights as the embedded one does: by Hugging Face's names. What it is
asked for is in the port; tests/rollout/engine_contract.py runs against any engine.
"""

from __future__ import annotations

import inspect
from typing import Any

from segue.by_path import load
from segue.clock import Compute
from segue.config import Config
from segue.errors import RunFailed, UserError
from segue.ports.engine import Engine
from segue.users_code import described

_METHODS = ("start", "generate", "abort", "pause", "load", "score", "resume", "forget", "counts", "stop")
MUST_BE = (
    "it must be a function that returns an engine (segue.ports.engine.Engine; segue/cluster/own_parts.py says how it is called)"
)


def own_engine(config: Config, *, node: str, model_path: str, device: str, compute: Compute, tokenizer: Any) -> Engine:
    """The user's engine. Raises `UserError` for whatever is wrong with it."""
    path = config.rollout.engine
    build = load(path, f"The engine rollout.engine = {path!r}", MUST_BE)
    named = {"node": node, "model_path": model_path, "device": device, "compute": compute, "tokenizer": tokenizer}
    try:
        inspect.signature(build).bind(config, **named)
    except TypeError:
        raise UserError(f"rollout.engine = {path!r} takes the arguments {inspect.signature(build)}: {MUST_BE}.") from None
    except ValueError:  # some builtins have no signature
        pass
    try:
        engine = build(config, **named)
    except (UserError, RunFailed):
        raise
    except Exception as error:
        raise UserError(
            f"The engine rollout.engine = {path!r} could not be made ({described(error, build)}): mend it."
        ) from error
    lacking = [method for method in _METHODS if not callable(getattr(engine, method, None))]
    if lacking:
        raise UserError(f"rollout.engine = {path!r} returned {type(engine).__name__}, which lacks {lacking[0]}: {MUST_BE}.")
    made: Engine = engine
    return made
