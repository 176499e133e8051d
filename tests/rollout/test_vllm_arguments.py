"""vLLM's engine arguments: what is wrong with them is one sentence; what Segue decides is decided in one place."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_models import save, tiny

from rollout.model_config import meta_model
from rollout.vllm import arguments
from rollout.vllm.arguments import OWNED, check_arguments, check_installed, known_arguments
from rollout.vllm.build import build_engine, engine_arguments
from rollout.vllm.environment import set_environment
from rollout.vllm.expected import kv_bytes_per_token, open_config
from rollout.vllm.memory import check_memory, weight_bytes
from rollout.vllm.noise import generator_seed
from segue.errors import UserError

with_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@with_vllm
def test_known_arguments_pass_and_what_segue_sets_is_known_to_vllm() -> None:
    check_arguments({"tensor_parallel_size": 2, "kv_cache_memory_bytes": 1 << 30})
    known = known_arguments()
    assert known is not None and set(OWNED) <= known


@with_vllm
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "tensor_paralel_size",
            2,
            ["rollout.engine_args.tensor_paralel_size", "did you mean rollout.engine_args.tensor_parallel_size?"],
        ),
        ("zzzzzzzz", 1, ["rollout.engine_args.zzzzzzzz", "leave it out"]),
        ("max_num_seqs", 1, ["rollout.engine_args.max_num_seqs", "set rollout.slots"]),
        ("kv_transfer_config", 1, ["rollout.engine_args.kv_transfer_config", "leave it out"]),
        ("data_parallel_size", 1, ["raise rollout.nodes"]),
        ("nnodes", 2, ["rollout.engine_args.nnodes", "on one machine"]),
        ("kv_cache_memory_bytes", "4GB", ["rollout.engine_args.kv_cache_memory_bytes = '4GB'", "whole number"]),
        ("tensor_parallel_size", 0, ["rollout.engine_args.tensor_parallel_size = 0", "1 or more"]),
    ],
)
def test_a_wrong_argument_is_one_sentence(name: str, value: Any, words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        check_arguments({name: value})
    assert all(word in str(refused.value) for word in words) and "\n" not in str(refused.value)


def test_without_vllm_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    Installed(monkeypatch, {"torch": "2.13.0"}, [])
    with pytest.raises(UserError, match=r"vLLM is not installed: run SEGUE_VLLM=1 \./launch\.sh"):
        check_arguments({})


def build(folder: Path, given: dict[str, Any] | None = None, head: int = 32, device: str = "cpu") -> dict[str, Any]:
    path = folder / f"model-{head}"
    if not path.is_dir():
        save(tiny(0, hidden_size=2 * head, num_attention_heads=2, num_key_value_heads=1, head_dim=head), path)
    config = open_config(str(path), 200)
    options: dict[str, Any] = {
        "slots": 4,
        "max_tokens": 200,
        "score_tokens": 64,
        "dtype": "float32",
        "device": device,
        "seed": 3,
        "worker_extension": "x.Extension",
    }
    return engine_arguments(str(path), config, given=given or {}, **options)


def test_kv_memory_holds_what_it_must(tmp_path: Path) -> None:
    found = build(tmp_path)
    per_token = 2 * 2 * 1 * 32 * 4
    assert kv_bytes_per_token(open_config(str(tmp_path / "model-32"), 200), "float32") == per_token
    assert found["kv_cache_memory_bytes"] == (2 * 4 * 7 + 4) * 32 * per_token
    assert build(tmp_path, {"kv_cache_memory_bytes": 1 << 24})["kv_cache_memory_bytes"] == 1 << 24
    with pytest.raises(UserError, match=r"kv_cache_memory_bytes = 1000 does not hold .* set it to \d+ or more"):
        build(tmp_path, {"kv_cache_memory_bytes": 1000})
    assert "kv_cache_memory_bytes" not in build(tmp_path, device="cuda:0"), "on a GPU vLLM takes what there is"


def test_several_workers_of_a_node_are_processes_of_its_own(tmp_path: Path) -> None:
    """vLLM would choose Ray for them inside a placement group."""
    assert "distributed_executor_backend" not in build(tmp_path, {"tensor_parallel_size": 1})
    assert build(tmp_path, {"tensor_parallel_size": 2})["distributed_executor_backend"] == "mp"
    assert (
        build(tmp_path, {"tensor_parallel_size": 2, "distributed_executor_backend": "x"})["distributed_executor_backend"] == "x"
    )


def test_a_model_that_vllm_cannot_run_on_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"attention heads of size 16, .* rollout\.engine = 'embedded'"):
        build(tmp_path, head=16)
    with pytest.raises(UserError, match="no model folder"):
        open_config(str(tmp_path), 10)
    with pytest.raises(UserError, match=r"max_tokens = 1000 is more than the 256 positions"):
        open_config(str(tmp_path / "model-16"), 1000)


def test_the_expected_model_has_the_real_ones_tensors(tmp_path: Path) -> None:
    real = tiny(0, tie_word_embeddings=True)
    save(real, tmp_path)
    expected = meta_model(open_config(str(tmp_path), 200), "float32")
    names = {name: tuple(p.shape) for name, p in real.named_parameters()}
    assert {name: tuple(p.shape) for name, p in expected.named_parameters()} == names
    assert all(p.device.type == "meta" for p in expected.parameters())


def test_the_users_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    set_environment("cpu", 2)
    import os

    assert (os.environ["VLLM_LOGGING_LEVEL"], os.environ["OMP_NUM_THREADS"]) == ("DEBUG", "2")


def test_noise_is_splitmix64_by_random_access() -> None:
    """Against the published loop."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    state, expected = mix(77), []
    for _ in range(5):
        state = (state + 0x9E3779B97F4A7C15) & mask
        expected.append(mix(state) >> 1)
    assert [generator_seed(77, number) for number in range(5)] == expected
    assert len({generator_seed(seed, number) for seed in range(50) for number in range(50)}) == 2500


class Installed:
    """What is installed, as far as `importlib.metadata` tells."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], requires: list[str]) -> None:
        self.versions, self.requires = versions, requires
        monkeypatch.setattr(importlib.metadata, "distribution", self._distribution)
        monkeypatch.setattr(importlib.metadata, "version", lambda name: self._distribution(name).version)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: "vllm" if "vllm" in str(versions) else None)

    def _distribution(self, name: str) -> Any:
        if name not in self.versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return SimpleNamespace(version=self.versions[name], requires=self.requires if name.startswith("vllm") else [])


CPU_BUILD = [
    'torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"',
    'torch==9; os_name == "none"',
    "numpy",
]
GPU_BUILD = ["torch==2.13.0", "torchvision"]


@pytest.mark.parametrize(
    ("versions", "requires", "sentence"),
    [
        ({"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}, CPU_BUILD, ""),
        ({"vllm": "0.32.1", "torch": "2.13.0", "torchvision": "0.28"}, GPU_BUILD, ""),
        ({"torch": "2.13.0"}, [], "vLLM is not installed: run SEGUE_VLLM=1 ./launch.sh"),
        (
            {"vllm": "0.33.0", "torch": "2.13.0"},
            GPU_BUILD,
            "vLLM 0.33.0 is installed, and Segue works with 0.32: run SEGUE_VLLM=1",
        ),
        (
            {"vllm-cpu": "0.32.0", "torch": "2.13.0"},
            CPU_BUILD,
            "vLLM 0.32.0 needs torch ==2.13.0+cpu, and 2.13.0 is installed: run SEGUE_VLLM=1 ./launch.sh --install-only, or set",
        ),
        ({"vllm": "0.32.0", "torch": "2.12.1"}, GPU_BUILD, "vLLM 0.32.0 needs torch ==2.13.0, and 2.12.1 is installed"),
        ({"vllm": "0.32.0"}, GPU_BUILD, "vLLM 0.32.0 needs torch ==2.13.0, and none is installed"),
        (
            {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "torchaudio": "2.13", "torchvision": "0.28"},
            CPU_BUILD,
            "torchvision, torchaudio cannot be imported beside torch 2.13.0+cpu, and vLLM fails with them: pip uninstall",
        ),
    ],
)
def test_a_vllm_that_cannot_run_here_is_found_out_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], requires: list[str], sentence: str
) -> None:
    Installed(monkeypatch, versions, requires)
    if sentence:
        with pytest.raises(UserError) as refused:
            check_installed()
        assert sentence in str(refused.value) and "\n" not in str(refused.value)
    else:
        check_installed()


@with_vllm
def test_what_is_installed_here_is_what_pyproject_names() -> None:
    check_installed()
    told = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"vllm-cpu=={arguments.VERSION}.' in told and f'"vllm=={arguments.VERSION}.' in told


def test_a_model_that_the_machine_cannot_hold_is_refused_before_it_starts() -> None:
    check_memory("/m", weights=3 << 30, kv=1 << 30, total=16 << 30, staged=True)
    check_memory("/m", weights=3 << 30, kv=4 << 30, total=8 << 30, staged=False)
    with pytest.raises(UserError) as refused:
        check_memory("/m", weights=3 << 30, kv=4 << 30, total=8 << 30, staged=True)
    assert str(refused.value) == (
        "The model in /m takes 3.0 GB, as much again while new weights come in (weightsync.staging = 'none' spares that), "
        "and KV memory another 4.0 GB, "
        "but this machine has 8.0 GB: use a smaller model, or lower "
        "rollout.engine_args.kv_cache_memory_bytes, rollout.slots or rollout.max_tokens."
    )


@with_vllm
def test_a_tied_head_is_counted_once_and_a_huge_kv_memory_is_refused(tmp_path: Path) -> None:
    model = tiny(0, tie_word_embeddings=True, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    path = save(model, tmp_path / "m")
    assert weight_bytes(meta_model(open_config(path, 100), "float32")) == 4 * sum(p.numel() for p in model.parameters())
    with pytest.raises(UserError, match=r"KV memory another 1048576\.0 GB, but this machine has [\d.]+ GB: use a smaller"):
        build_engine(
            path,
            slots=2,
            max_tokens=100,
            score_tokens=10,
            dtype="float32",
            device="cpu",
            worker_extension="",
            engine_args={"kv_cache_memory_bytes": 1 << 50},
        )
