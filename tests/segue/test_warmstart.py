"""The warm start: named by its content, whole or absent, and made of episodes as rollouts would log them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envpool.suites import load_suite
from learner.tokenizer import build_tokenizer
from rollout.chat import ChatRenderer
from segue.cluster import warmstart as made
from segue.cluster.cache import ROOT, fingerprint
from segue.cluster.warmstart import cached, demonstrations, recipe_of, warmstart
from segue.config import Config
from segue.config.root import resolve
from segue.errors import UserError
from segue.trajectory import Author, TokenLog

SMALL = {"hidden_size": 32, "layers": 1, "heads": 1, "intermediate_size": 32, "steps": 3, "batch": 8, "threads": 1}


def config(**changes: Any) -> Config:
    """`changes` are dotted keys with `_` for dots: warmstart__steps=4."""
    data: dict[str, Any] = {
        "steps": 1,
        "task": {"env": "search_qa", "args": {"facts": ["elements"], "digits": 2}},
        "warmstart": dict(SMALL),
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = data
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return resolve(data, "test")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEGUE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "warmstart"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One small warm start, made for real."""
    root = tmp_path_factory.mktemp("made")
    before = os.environ.get("SEGUE_CACHE")
    os.environ["SEGUE_CACHE"] = str(root)
    try:
        yield warmstart(config(), progress=False)
    finally:
        if before is None:
            del os.environ["SEGUE_CACHE"]
        else:
            os.environ["SEGUE_CACHE"] = before


# --- the name ------------------------------------------------------------------------------------------------------------


def name_of(config: Config) -> str:
    return fingerprint(recipe_of(config))


@pytest.mark.parametrize(
    "change",
    [
        {"warmstart__steps": 4},
        {"warmstart__seed": 1},
        {"warmstart__good_share": 0.5},
        {"warmstart__hidden_size": 64},
        {"task__args": {"facts": ["elements"], "digits": 3}},
        {"task__env": "latency", "task__args": {}},
    ],
)
def test_what_matters_changes_the_name(change: dict[str, Any]) -> None:
    assert name_of(config(**change)) != name_of(config())


def test_what_does_not_matter_leaves_the_name() -> None:
    other = config(warmstart__threads=2, steps=9, seed=5, learner__lr=0.1, task__train_tasks=7, group__size=4)
    assert name_of(other) == name_of(config())


def test_code_data_and_packages_are_part_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = tmp_path / "facts.jsonl"
    facts.write_text('{"name": "iron", "attribute": "number", "value": 26}\n')
    own = config(task__args={"facts": [str(facts)]})
    names = [name_of(own)]
    facts.write_text('{"name": "iron", "attribute": "number", "value": 27}\n')
    names.append(name_of(own))
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1" if name == "torch" else real(name))
    names.append(name_of(own))
    monkeypatch.setattr(made, "_digest", lambda path: "changed" if path.name == "teacher.py" else "same")
    names.append(name_of(own))
    monkeypatch.setattr(made, "_digest", lambda path: "changed" if path.name == "chat.py" else "same")
    names.append(name_of(own))
    assert len(set(names)) == 5


@pytest.mark.processes
def test_all_code_that_makes_it_is_in_the_recipe(own_cache: Path) -> None:
    """Every module of ours that making one loads is hashed, but for those that only read the config or say what went wrong."""
    code = (
        "import sys, json; from segue.cluster.warmstart import warmstart, recipe_of; from segue.config.root import resolve; "
        "config = resolve(json.loads(sys.argv[1]), 'test'); warmstart(config, progress=False); "
        "files = [m.__file__ for m in list(sys.modules.values()) if getattr(m, '__file__', None)]; "
        "print(json.dumps([files, list(recipe_of(config)['code'])]))"
    )
    data = config().model_dump(mode="json", exclude_none=True)
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(data)], check=True, timeout=300, stdout=subprocess.PIPE, text=True
    )
    files, hashed = json.loads(done.stdout.splitlines()[-1])
    ours = {str(Path(f).relative_to(ROOT)) for f in files if Path(f).is_relative_to(ROOT) and ".venv" not in f}
    assert len(ours) > 20
    rest = {f for f in ours - set(hashed) if not f.startswith("segue/config/") and not f.endswith("/__init__.py")}
    says_what_went_wrong = {"segue/errors.py", "segue/users_code.py", "segue/model_folder.py"}
    says_how_far_it_is = {"segue/cluster/progress.py"}
    finds_others = {"envpool/suites/own.py", "segue/by_path.py", "segue/suite_path.py", "segue/cluster/cache.py"}
    assert rest == {"segue/wire.py", "segue/ports/rpc.py", *says_what_went_wrong, *says_how_far_it_is, *finds_others}


def test_an_unknown_suite_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"no environment suite task.env = 'serch_qa'.*search_qa"):
        cached(config(task__env="serch_qa", task__args={}))


# --- the folder ----------------------------------------------------------------------------------------------------------


def test_made_once_and_found_again(folder: Path, own_cache: Path) -> None:
    assert cached(config()) is None
    shutil.copytree(folder, own_cache / folder.name)
    assert cached(config()) == own_cache / folder.name == warmstart(config(), progress=False)
    assert [path.name for path in own_cache.iterdir()] == [folder.name]


def test_it_is_a_model_with_its_tokenizer(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lm, tokenizer = AutoModelForCausalLM.from_pretrained(str(folder)), AutoTokenizer.from_pretrained(str(folder))
    assert lm.config.model_type == "llama" and not lm.config.tie_word_embeddings
    assert lm.config.vocab_size == len(tokenizer) == lm.lm_head.weight.shape[0]
    assert lm.config.eos_token_id == tokenizer.eos_token_id == ChatRenderer(tokenizer).close_tokens[-1]
    assert (lm.lm_head.weight != lm.model.embed_tokens.weight).any(), "equal at the start, trained apart"
    assert {str(p.dtype) for p in lm.parameters()} == {"torch.float32"}
    assert json.loads((folder / "recipe.json").read_text()) == recipe_of(config())


def test_equal_recipes_give_equal_weights_and_say_how_far_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = warmstart(config())
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["Warm start: demonstrations: 0 of 24", "Warm start: distillation: 0 of 3"]
    assert said[-1].endswith("tokens, 24 demonstrations.")
    assert again != folder
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_folder_is_not_used_and_is_made_anew(missing: str, folder: Path, own_cache: Path) -> None:
    place = own_cache / folder.name
    shutil.copytree(folder, place)
    (place / missing).unlink()
    assert cached(config()) is None
    if missing == "model.safetensors":
        assert warmstart(config(), progress=False) == place and cached(config()) == place


def test_an_interrupted_one_leaves_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        (args[2] / "config.json").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(made, "_make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        warmstart(config(), progress=False)
    assert cached(config()) is None and list(own_cache.iterdir()) == []


def test_the_slower_of_two_throws_its_own_away(folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = own_cache / folder.name

    def overtaken(config: Config, wanted: Any, aside: Path, progress: bool) -> None:
        (aside / "config.json").write_text("mine")
        shutil.copytree(folder, place)  # meanwhile the other process finished

    monkeypatch.setattr(made, "_make", overtaken)
    assert warmstart(config(), progress=False) == place == cached(config())
    assert (place / "config.json").read_text() != "mine"
    assert [path.name for path in own_cache.iterdir()] == [folder.name]


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SEGUE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be written to .*file/warmstart \(.+\): free space there, or set SEGUE_CACHE"):
        warmstart(config(), progress=False)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("SEGUE_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(made, "_make", full)
    with pytest.raises(UserError, match=r"\(No space left on device\)"):
        warmstart(config(), progress=False)


@pytest.mark.processes
def test_finding_it_loads_no_torch() -> None:
    """The plan of a run is printed within seconds: nothing heavy may be imported to know whether the model is there."""
    code = (
        "import sys; from segue.cluster.warmstart import cached; from segue.config.root import resolve; "
        "cached(resolve({'steps': 1, 'task': {'env': 'search_qa'}, 'warmstart': {}}, 'test')); "
        "heavy = {'torch', 'transformers', 'ray', 'bm25s', 'tokenizers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- the demonstrations --------------------------------------------------------------------------------------------------


@cache
def suite() -> Any:
    return load_suite("search_qa", {"facts": ["elements"], "digits": 2})


@cache
def renderer() -> ChatRenderer:
    return ChatRenderer(build_tokenizer(suite().vocabulary()))


def shown(n: int, good_share: float = 0.5) -> list[TokenLog]:
    return list(demonstrations(suite(), renderer(), n, 0, good_share))


def test_demonstrations_are_logged_as_rollouts_would_log_them() -> None:
    """Rebuilt piece by piece by the rules of the episode loop: the prompt; each action up to the token that completes a
    stop string, sampled; the end-of-turn token, forced; observation and next generation prompt; nothing after the last step."""
    chat = renderer()
    rng = random.Random(0)
    tasks = suite().tasks("train", 40, 0)
    for task, log in zip(tasks, shown(40), strict=True):
        teacher = suite().demonstrate(task, rng, 0.5)
        tokens, mask = chat.prompt(teacher.prompt.messages), []
        mask += [0] * len(tokens)
        for turn in teacher.turns:
            action = chat.encode_data(turn.action)
            texts = [chat.text(action[: k + 1]) for k in range(len(action))]
            stops = [any(stop in text for stop in teacher.prompt.stop) for text in texts]
            assert stops == [False] * (len(action) - 1) + [True], "an engine would have ended this action elsewhere"
            assert texts[-1] == turn.action
            assert chat.closing(action) == chat.close_tokens
            tokens, mask = [*tokens, *action, *chat.close_tokens], [*mask, *[1] * len(action), *[0] * len(chat.close_tokens)]
            if not turn.result.terminated:
                observation = chat.delta(turn.result.observation.messages)
                tokens, mask = tokens + observation, mask + [0] * len(observation)
        assert log.tokens.tolist() == tokens
        assert log.mask.tolist() == mask
        log.validate()
        assert {s.author for s in log.segments} <= {Author.USER, Author.ASSISTANT, Author.OBSERVATION}


def test_demonstrations_show_training_tasks_alone() -> None:
    chat = renderer()
    held_out = {task.payload["question"] for task in suite().tasks("eval", 400, 0)}
    training = [task.payload["question"] for task in suite().tasks("train", 400, 0)]
    asked = [chat.text(log.tokens.tolist()[1 : log.segments[0].length - 2]) for log in shown(400)]
    assert asked == training and not held_out & set(asked)


def test_demonstrations_are_of_mixed_quality_and_seeded() -> None:
    first, again = shown(200, 0.4), shown(200, 0.4)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    turns = [max(segment.turn for segment in log.segments) + 1 for log in first]
    assert turns.count(4) >= 60 and turns.count(1) >= 40


def test_a_suite_with_few_tasks_is_demonstrated_again() -> None:
    facts = [f'{{"name": "n{i}", "attribute": "size", "value": {i + 10}}}' for i in range(20)]
    path = Path(os.environ["SEGUE_CACHE"]).parent / "few.jsonl"
    path.write_text("\n".join(facts))
    few = load_suite("search_qa", {"facts": [str(path)], "operations": ["plus"]})
    chat = ChatRenderer(build_tokenizer(few.vocabulary()))
    logs = list(demonstrations(few, chat, 600, 0, 1.0))
    prompts = {tuple(log.tokens[: log.segments[0].length].tolist()) for log in logs}
    assert len(logs) == 600 and 100 < len(prompts) <= 190


def test_a_suite_of_the_users_own_is_part_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "my_questions.py"
    module.write_text("from envpool.suites.search_qa import build\n")
    monkeypatch.syspath_prepend(tmp_path)
    data = config().model_dump(mode="json", exclude_none=True)
    mine = resolve({**data, "task": {"env": "my_questions:build"}}, "test")
    before = fingerprint(recipe_of(mine))
    module.write_text("from envpool.suites.search_qa import build  # changed\n")
    assert fingerprint(recipe_of(mine)) != before
