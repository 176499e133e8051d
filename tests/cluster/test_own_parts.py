"""`rollout.engine` and `learner.trainer` of the user's own: found, called as documented, and refused with one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from segue.clock import LogicalCompute
from segue.cluster.own_parts import own_engine
from segue.config import Config, load_config
from segue.errors import UserError

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "smoke.toml"
MODULE = """
class Engine:
    def __init__(self, **given):
        self.given = given
    def _nothing(self, *args):
        pass
    start = generate = abort = pause = load = score = resume = forget = counts = stop = _nothing

class Half:
    start = generate = lambda self: None

def build(config, *, node, model_path, device, compute, tokenizer):
    return Engine(node=node, model_path=model_path, device=device, slots=config.rollout.slots)

def half(config, **given):
    return Half()

def picky(config, node):
    return Engine()

def broken(config, **given):
    raise KeyError("no such thing")

number = 7
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def make(name: str) -> Any:
    config: Config = load_config(CONFIG, [f"rollout.engine='parts_of_mine:{name}'", "rollout.slots=5"])
    compute = LogicalCompute()
    return own_engine(config, node="rollout-3", model_path="/m", device="cpu", compute=compute, tokenizer=None)


def test_the_function_is_called_as_documented() -> None:
    assert make("build").given == {"node": "rollout-3", "model_path": "/m", "device": "cpu", "slots": 5}


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("half", "returned Half, which lacks abort"),
        ("picky", "takes the arguments"),
        ("broken", "could not be made"),
        ("number", "must be a function"),
        ("nowhere", "nowhere"),
    ],
)
def test_whatever_is_wrong_with_it_is_one_sentence(name: str, what: str) -> None:
    with pytest.raises(UserError, match=what) as said:
        make(name)
    assert "parts_of_mine" in str(said.value) and "\n" not in str(said.value)


@pytest.mark.parametrize("value", ["embeded", "no/path:x", "module:", ":name", "module:a b"])
def test_what_names_neither_ours_nor_a_path_is_refused(value: str) -> None:
    with pytest.raises(UserError, match="one of your own as module:name"):
        load_config(CONFIG, [f"rollout.engine={value!r}"])
