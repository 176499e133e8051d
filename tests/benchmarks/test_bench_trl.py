"""Segue beside TRL: the command line, what is said where TRL is missing, the figures, and (where TRL is) two real steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks import result, trl_peer
from benchmarks.command import install
from benchmarks.figures import Window
from benchmarks.trl_peer import CONFIG
from benchmarks.trl_worker import options
from segue.cluster.prepare import find_model
from segue.config import load_config, to_toml
from segue.errors import UserError

HERE = all(importlib.util.find_spec(name) for name in trl_peer.NEEDED)
needs_trl = pytest.mark.skipif(not HERE, reason="TRL is not installed: the extra peers")


def test_steps_and_latencies_are_read() -> None:
    args = trl_peer.parse(["--steps", "trl=5", "--means", "0", "0.5", "--threads", "1"])
    assert dict(args.steps) == {"segue": 24, "trl": 5} and args.means == [0.0, 0.5] and args.threads == 1


@pytest.mark.parametrize("words", [["--steps", "trl=2"], ["--steps", "verl=5"], ["--steps", "trl=x"], ["--repeats", "0"]])
def test_impossible_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        trl_peer.parse(words)
    assert ended.value.code == 2 and "error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--means", "0", "-1"], "0 or more"),
        (["--means", "1", "1"], "different"),
        (["--config", "configs/quickstart.toml"], "need the suite latency"),
        (["--steps", "segue=3"], "no steady state"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIG.parent.parent)
    with pytest.raises(UserError, match=said):
        trl_peer.check(trl_peer.parse(words))


def test_a_missing_trl_is_one_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trl" else found("json"))
    monkeypatch.setattr("sys.argv", ["trl_peer"])
    assert trl_peer.main() == 2
    assert capsys.readouterr().err == (
        f"This benchmark trains with TRL, and trl is not installed: {install('peers')}, "
        "or install trl==1.16.0 into a folder and put that on PYTHONPATH.\n"
    )


def test_both_have_the_same_settings(tmp_path: Path) -> None:
    config = load_config(CONFIG)
    told = options(config, str(tmp_path), 5, [3])
    assert told["per_device_train_batch_size"] == config.batch.groups * config.group.size == 64
    assert told["num_generations"] == config.group.size and told["learning_rate"] == config.learner.lr
    assert told["max_completion_length"] == config.rollout.max_turn_tokens and told["loss_type"] == "grpo"
    assert (told["epsilon"], told["epsilon_high"]) == (config.learner.clip_low, config.learner.clip_high)


def test_rates_leave_the_warm_up_out() -> None:
    lines = [
        {"step": i + 1, "seconds": s, "tokens": 100 * (i + 1), "reward": 0.5} for i, s in enumerate((10.0, 12.0, 13.0, 14.0))
    ]
    figures = trl_peer.trl_figures(lines)
    assert figures["tokens_per_second"] == pytest.approx(700 / 2.0) and figures["steps_per_second"] == pytest.approx(1.0)
    assert figures["tokens_per_step"] == 350.0
    ours = [{"elapsed_seconds": s, "tokens_trained": 50.0, "reward_mean": 0.0} for s in (5.0, 6.0, 8.0, 9.0)]
    found = trl_peer.segue_figures(ours, Window(1, 3))
    assert found["tokens_per_second"] == pytest.approx(100 / 3.0) and found["tokens_per_step"] == 50.0


def test_claims_are_judged_by_the_median_pair() -> None:
    def pair(ours: float, theirs: float) -> dict[str, dict[str, float]]:
        return {
            "segue": {"tokens_per_second": ours, "steps_per_second": 1.0},
            "trl": {"tokens_per_second": theirs, "steps_per_second": 1.0},
        }

    points = trl_peer.summarize({0.0: [pair(9, 10), pair(20, 10), pair(8, 10)], 0.3: [pair(31, 10)]})["points"]
    assert [(p["kind"], p["ratio"], p["holds"]) for p in points] == [
        ("without_latency", 0.9, False),
        ("with_latency", 3.1, True),
    ]


@pytest.mark.parametrize(("holds", "code"), [([True, True], 0), ([True, False], 1)])
def test_a_claim_that_does_not_hold_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], holds: list[bool], code: int
) -> None:
    points = [{"mean_seconds": 0.3, "ratio": 2.0, "ratios": [2.0], "needed": 3.0, "holds": held} for held in holds]
    monkeypatch.setattr("sys.argv", ["trl_peer"])
    monkeypatch.setattr(trl_peer, "check", lambda args: None)
    monkeypatch.setattr(trl_peer, "measure", lambda args, scratch: {"points": points})
    monkeypatch.setattr(result, "document", lambda *figures, **told: {})
    assert trl_peer.main() == code
    assert capsys.readouterr().out.count("NOT as claimed") == holds.count(False)


@pytest.mark.full
@pytest.mark.processes
@needs_trl
def test_trl_trains_two_steps(tmp_path: Path) -> None:
    config = load_config(CONFIG, ["task.args.mean=0.0", "batch.groups=2"])
    job = {"config": to_toml(config), "model": find_model(config), "steps": 2, "threads": 1, "folder": str(tmp_path)}
    lines = trl_peer.train_with_trl(job)
    assert [line["step"] for line in lines] == [1, 2] and all(0 < line["tokens"] <= 8 * 4 * 12 for line in lines)
