"""A whole run whose engines load wrong weights: it ends, and says which node ran what (F37)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from e2e_run import END_SECONDS, Command

pytestmark = pytest.mark.processes

CHANGES = """
import importlib.abc
import importlib.util
import sys

class Loader(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "{module}":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def changed(module):
            execute(module)
{change}

        spec.loader.exec_module = changed
        return spec

sys.meta_path.insert(0, Loader())
"""
"""A sitecustomize module that changes a module when it is imported."""

LEAVES_THE_HEAD_OLD = """
            bind = module.bind

            def forgetful(model, weights):
                head = model.lm_head.weight.data_ptr()
                return [(to, of) for to, of in bind(model, weights) if weights.version < 3 or to.data_ptr() != head]

            module.bind = forgetful
"""
"""From version 3 on, the engine's loader forgets one tensor and reports success."""

HAS_ANOTHER_SHAPE = """
            expected = module._expected

            def narrower(path, config):
                tensors = expected(path, config)
                name = "model.layers.0.mlp.up_proj.weight"
                return {**tensors, name: tensors[name][:-1].contiguous()}

            module._expected = narrower
"""
"""The nodes' model is narrower than the learner's."""


def change(folder: Path, module: str, text: str) -> None:
    (folder / "sitecustomize.py").write_text(CHANGES.replace("{module}", module).replace("{change}", text))


@pytest.mark.parametrize("serial", [True, pytest.param(False, marks=pytest.mark.full)])
def test_an_engine_that_does_not_run_what_was_published_ends_the_run(smoke: Path, tmp_path: Path, serial: bool) -> None:
    """One optimizer step is all that the head is behind."""
    change(tmp_path, "rollout.fitting", LEAVES_THE_HEAD_OLD)
    flags = ["--serial"] if serial else []
    with Command("train", smoke, "--run", tmp_path / "run", *flags, env={"PYTHONPATH": str(tmp_path)}) as command:
        command.steps(1)
        assert command.wait(END_SECONDS) == 1, command.tails()
        said = "\n".join(command.out + command.err)
        found = re.search(r"rollout-\d does not run the weights of version 3: .* by up to (\S+) nats, .* = 0.001 ", said)
        assert found and 1e-3 < float(found[1]) < 1.0, said
        command.assert_nothing_left(within=10.0)


@pytest.mark.full
def test_a_node_whose_model_has_another_shape_is_named_with_both_sides(smoke: Path, tmp_path: Path) -> None:
    change(tmp_path, "segue.cluster.wiring", HAS_ANOTHER_SHAPE)
    with Command("train", smoke, "--run", tmp_path / "run", "--serial", env={"PYTHONPATH": str(tmp_path)}) as command:
        assert command.wait() == 1, command.tails()
        wrong = "the manifest gives model.layers.0.mlp.up_proj.weight as float32[128, 64] where the model has float32[127, 64]"
        assert f"rollout-0 refused the manifest: {wrong}" in command.sentence()
        assert command.sentence().endswith(": start learner and nodes from one model folder.")
