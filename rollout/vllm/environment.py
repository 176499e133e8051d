"""What vLLM takes from the environment. Set before its first import, for it and the processes it starts; a user's value stays."""

from __future__ import annotations

import os

ALWAYS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the noise of `worker.RowNoise` goes into the sampler of the first one
}
ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it takes all cores of the machine for itself
    "TORCHDYNAMO_DISABLE": "1",  # else the first log-probabilities wait for a C++ compiler
}


def set_environment(device: str, threads: int) -> None:
    """`device`: torch's name; `threads`: of each process on a CPU."""
    wanted = dict(ALWAYS)
    if device == "cpu":
        wanted |= ON_CPU
        os.environ["OMP_NUM_THREADS"] = str(threads)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
