"""vLLM that does not start: one sentence with the first cause, whichever process failed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from engine_models import save, tiny
from vllm_harness import EXTENSION, MAX_TOKENS, SIZES

from rollout.vllm.build import engine_arguments
from rollout.vllm.environment import set_environment
from rollout.vllm.expected import open_config
from rollout.vllm.starting import Printed, cause_of, not_started
from segue.errors import UserError

with_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

WORKER_FAILED = """\
(EngineCore pid=1) WARNING 11-29 21:24:05 [x.py:1] a warning about no Error at all
(Worker pid=2) ERROR 11-29 21:24:10 [multiproc_executor.py:1063] Traceback (most recent call last):
(Worker pid=2) ERROR 11-29 21:24:10 [multiproc_executor.py:1063]   File "x.py", line 1, in f
(Worker pid=2) ERROR 11-29 21:24:10 [multiproc_executor.py:1063] torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB.
(EngineCore pid=1) ERROR 11-29 21:24:10 [core.py:1510] Exception: WorkerProc initialization failed in a background process.
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_first_exception_is_the_cause() -> None:
    assert cause_of(WORKER_FAILED) == "OutOfMemoryError: CUDA out of memory. Tried 2 GiB."
    assert cause_of("all is well\nand nothing: failed") == ""


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        ("OutOfMemoryError: CUDA out of memory.", "tensor_parallel_size."),
        ("ValueError: 3 GiB KV cache is needed, more than 1 GiB.", "rollout.max_tokens."),
        ("ValueError: Architectures ['X'] are not supported for now.", "rollout.engine = 'embedded'."),
        ("KeyError: 'x'", "the node's log has all of it."),
    ],
)
def test_each_cause_has_its_remedy(cause: str, remedy: str) -> None:
    sentence = str(not_started(cause))
    assert sentence.startswith(f"vLLM did not start ({cause.rstrip('.')}): ") and sentence.endswith(remedy)


def test_long_causes_are_cut_to_one_line() -> None:
    sentence = str(not_started("ValueError: " + "a supported\n  architecture, " * 100))
    assert len(sentence) < 600 and "\n" not in sentence and " …): " in sentence


def test_what_is_printed_from_now_on_is_read_where_it_goes_to_a_file(capfd: pytest.CaptureFixture[str]) -> None:
    os.write(2, b"before\n")
    printed = Printed()
    os.write(2, b"after\n")
    assert printed.read() == "after\n"


async def fails(folder: Path, seconds: float = 100.0, **given: Any) -> str:
    """The sentence of a vLLM that does not start."""
    from rollout.vllm.core import Core

    set_environment("cpu", 1)
    path = save(tiny(0, **SIZES), folder / "model")
    arguments = engine_arguments(
        path,
        open_config(path, MAX_TOKENS),
        slots=2,
        max_tokens=MAX_TOKENS,
        score_tokens=64,
        dtype="float32",
        device="cpu",
        seed=0,
        worker_extension=EXTENSION,
        given=given,
    )
    core = Core(arguments, seconds)
    try:
        with pytest.raises(UserError) as refused:
            await core.start()
    finally:
        await core.stop()
    assert core.pids() == [] and "\n" not in str(refused.value)
    return str(refused.value)


@with_vllm
@pytest.mark.processes
async def test_an_argument_that_vllm_refuses_is_a_sentence(tmp_path: Path) -> None:
    sentence = await fails(tmp_path, quantization="nonsense")
    assert sentence.startswith("vLLM did not start (ValidationError: Unknown quantization method: nonsense.")


@with_vllm
@pytest.mark.processes
async def test_a_start_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    assert await fails(tmp_path, 0.5) == (
        "vLLM did not start (it was not ready within 0.5 s): correct rollout.engine_args or the model folder; "
        "the node's log has all of it."
    )


@with_vllm
@pytest.mark.full
async def test_a_failure_in_a_worker_is_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Memory that the machine does not have."""
    assert "needs, or lower rollout.max_tokens." in await fails(tmp_path, kv_cache_memory_bytes=1 << 50)
