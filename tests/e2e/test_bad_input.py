"""A user's mistakes and a machine's troubles: one sentence each (what, where, what to do), exit code 2 or 1, no traceback.

What the config alone decides is tested in tests/segue/test_config.py; here it goes through the whole command.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from e2e_run import LONG, Command, segue
from safetensors.torch import load_file, save_file

from segue.config import load_config
from segue.rundir import RunDir

pytestmark = pytest.mark.processes


def config_of(model: Path, smoke: Path, path: Path) -> Path:
    """The smoke config with a model of one's own, written to `path`."""
    data = load_config(smoke).model_dump(exclude_none=True)
    data.pop("warmstart", None)
    data["model"] = {"path": str(model)}
    path.write_text(tomli_w.dumps(data))
    return path


@pytest.fixture(scope="module")
def model(smoke: Path) -> Path:
    """The folder of the smoke config's starting model."""
    config = load_config(smoke)
    if config.model.path:
        return Path(config.model.path)
    return Path(segue("warmstart", smoke).out[-1])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "There is no config file {path}: name one that exists, for instance configs/quickstart.toml."),
        ("steps = [", "{path} is not valid TOML ("),
        ("steps = 1\nstesp = 2", "{path} has an unknown key stesp = 2: did you mean steps?"),
    ],
    ids=["missing", "malformed", "unknown key"],
)
def test_a_config_that_is_none(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / "my.toml"
    if text is not None:
        path.write_text(text + '\n[task]\nenv = "search_qa"\n')
    command = segue("train", path)
    assert command.wait() == 2
    assert command.sentence().startswith(sentence.format(path=path)), command.tails()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("staleness.max_age=-1", "sets staleness.max_age = -1, which must be greater than or equal to 0: change it."),
        ("group.size=1", "sets group.size = 1 with learner.advantage = 'grpo', whose baseline needs other members"),
        ("task.env=serch_qa", "There is no environment suite task.env = 'serch_qa': did you mean 'search_qa'?"),
        ("eval.tasks=10000000", "10000000"),
        ("learner.lrr=1", "has an unknown key learner.lrr = 1: did you mean learner.lr?"),
        ("cluster.ports=[9, 5]", "cluster.ports"),
    ],
)
def test_values_that_cannot_be(smoke: Path, tmp_path: Path, override: str, sentence: str) -> None:
    command = segue("train", smoke, "--run", tmp_path / "run", "--set", override)
    assert (command.wait(), command.out) == (2, [])
    assert sentence in command.sentence()
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_a_model_path_that_is_no_model(smoke: Path, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", Path("meta-llama/nothing-local")):
        command = segue("train", config_of(path, smoke, tmp_path / "my.toml"), "--run", tmp_path / "run")
        assert command.wait() == 2
        assert command.sentence() == (
            f"model.path = '{path}' is no Hugging Face model folder (it has no config.json): name one that is."
        )
    assert not (tmp_path / "run").exists()


def test_a_model_whose_weights_are_damaged(smoke: Path, model: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    weights = broken / "model.safetensors"
    whole = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[: whole // 2])
    command = segue("train", config_of(broken, smoke, tmp_path / "my.toml"), "--run", tmp_path / "run")
    assert (command.wait(), command.out) == (2, []), command.tails()
    cut = f"The weights in {weights} are cut short ({weights.stat().st_size} bytes of at least {whole}): copy it again whole"
    assert command.sentence().startswith(cut)
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_a_model_that_lacks_a_weight(smoke: Path, model: Path, tmp_path: Path) -> None:
    """transformers would fill in random numbers and say so in a table in a log."""
    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.0.mlp.down_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    command = segue("train", config_of(broken, smoke, tmp_path / "my.toml"), "--run", tmp_path / "run")
    assert command.wait() == 2, command.tails()
    assert command.sentence() == (
        f"The weights in {broken} are not those of the model in its config.json: model.layers.0.mlp.down_proj.weight is missing; "
        "copy it again whole, or name another folder in model.path."
    )


def test_a_tokenizer_without_chat_template(smoke: Path, model: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    (bare / "chat_template.jinja").unlink()
    command = segue("train", config_of(bare, smoke, tmp_path / "my.toml"), "--run", tmp_path / "run")
    assert command.wait() == 2, command.tails()
    assert "chat template" in command.sentence()
    again = segue("train", smoke, "--run", tmp_path / "run", "--serial", "--set", "steps=1", "--set", "eval.tasks=0")
    assert again.wait() == 0, again.tails()
    assert any(line.startswith("  again     an earlier attempt in that directory trained no step") for line in again.out)


def test_a_used_run_directory(smoke: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.txt").touch()
    command = segue("train", smoke, "--run", run)
    assert command.wait() == 2
    assert command.sentence() == f"{run} is not empty and no run directory: name a new or an empty folder with --run."
    command = segue("train", smoke, "--run", run, "--resume")
    assert command.wait() == 2 and "is no run directory" in command.sentence()
    command = segue("train", smoke, "--resume")
    assert command.wait() == 2 and "--run DIR" in command.sentence()


def test_nothing_to_resume_from(smoke: Path, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", smoke.read_text())
    before = run.config.read_bytes()
    command = segue("train", smoke, "--run", run.path, "--resume")
    assert command.wait() == 2
    assert "has no complete checkpoint to resume from" in command.sentence()
    assert run.config.read_bytes() == before and run.attempts() == 0, "nothing was changed"


def test_no_free_port(smoke: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = segue("train", smoke, "--run", tmp_path / "run", "--set", f"cluster.ports=[{port}, {port}]")
    assert command.wait() == 2, command.tails()
    assert command.sentence().startswith(f"cluster.ports = [{port}, {port}] has 0 free ports on 127.0.0.1 and this run takes ")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB, which a run soon fills."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)], capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk(smoke: Path, small_disk: Path) -> None:
    run = small_disk / "run"
    with Command("train", smoke, "--run", run, *LONG, "--set", "checkpoint.keep=1000") as command:
        assert command.wait() == 1, command.tails()
        command.assert_nothing_left()
    assert f"{run}/" in command.sentence() and "disk is full" in command.sentence() and "free some space" in command.sentence()
    assert not [path for path in (run / "checkpoints").glob("step_*") if not (path / "COMPLETE").is_file()]


def test_a_limit_on_file_sizes(smoke: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE (as `ulimit -f` sets it) fails a write like a full disk does."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, 1 << 17))

    command = segue("train", smoke, "--run", tmp_path / "run", *LONG, "--serial", preexec=limit)
    assert command.wait() == 1, command.tails()
    assert f"{tmp_path}/run/" in command.sentence() and "(ulimit -f)" in command.sentence()


def test_an_odd_environment(smoke: Path, tmp_path: Path) -> None:
    """No home that could be written, somebody's Ray address, a deep folder for temporary files: the run does not care."""
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    odd = {"HOME": "/proc/nobody", "RAY_ADDRESS": "ray://nowhere.invalid:10001", "RAY_NAMESPACE": "theirs", "TMPDIR": str(deep)}
    flags = (*LONG, "--set", "steps=2")
    with Command("train", smoke, "--run", tmp_path / "run", *flags, env=odd) as command:
        assert command.wait() == 0, command.tails()
        assert command.err == []
        command.assert_nothing_left()
    assert not list(deep.glob("segue-*"))
