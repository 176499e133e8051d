"""A whole run whose engines load wrong weights: it ends, and says which node ran what (F37)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from e2e_run import END_SECONDS, Command

pytestmark = pytest.mark.processes

LEAVES_THE_HEAD_OLD = """
import importlib.abc
import importlib.util
import sys

class Loader(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "rollout.fitting":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def changed(module):
            execute(module)
            bind = module.bind

            def forgetful(model, weights):
                head = model.lm_head.weight.data_ptr()
                return [(to, of) for to, of in bind(model, weights) if weights.version < 3 or to.data_ptr() != head]

            module.bind = forgetful

        spec.loader.exec_module = changed
        return spec

sys.meta_path.insert(0, Loader())
"""
"""A sitecustomize module: from version 3 on, the engine's loader forgets one tensor and reports success."""


@pytest.mark.parametrize("serial", [True, pytest.param(False, marks=pytest.mark.full)])
def test_an_engine_that_does_not_run_what_was_published_ends_the_run(smoke: Path, tmp_path: Path, serial: bool) -> None:
    """One optimizer step is all that the head is behind."""
    (tmp_path / "sitecustomize.py").write_text(LEAVES_THE_HEAD_OLD)
    flags = ["--serial"] if serial else []
    with Command("train", smoke, "--run", tmp_path / "run", *flags, env={"PYTHONPATH": str(tmp_path)}) as command:
        command.steps(1)
        assert command.wait(END_SECONDS) == 1, command.tails()
        said = "\n".join(command.out + command.err)
        found = re.search(r"rollout-\d does not run the weights of version 3: .* by up to (\S+) nats, .* = 0.001 ", said)
        assert found and 1e-3 < float(found[1]) < 1.0, said
        command.assert_nothing_left(within=10.0)
