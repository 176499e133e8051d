"""Which roles get GPUs, where the config leaves it to the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

from segue.config import Config
from segue.errors import UserError


def gpus_here() -> int:
    """GPUs of this machine that this process may use: by CUDA_VISIBLE_DEVICES if it is set, else as nvidia-smi lists them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30.0, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def with_devices(config: Config, gpus: int | None = None) -> Config:
    """The config with `rollout.gpus`, `learner.gpus` and `weightsync.backend` filled in from `gpus` (default: `gpus_here`).

    Nothing is changed where `cluster.device` is "cpu" or the config gives GPUs itself. Nodes get one for each of their engine's
    workers, learner ranks one each; or equal shares where there are fewer. NCCL refuses two ranks on one GPU, so shared ones
    exchange weights over gloo. Raises `UserError` for `cluster.device = "cuda"` on a machine without GPUs, and where workers of
    one engine would have to share.
    """
    if config.cluster.device == "cpu" or config.rollout.gpus or config.learner.gpus:
        return config
    count = gpus_here() if gpus is None else gpus
    if count == 0:
        if config.cluster.device == "cuda":
            raise UserError("cluster.device = 'cuda', but this machine has no GPU to use: set it to 'cpu' or 'auto'.")
        return config
    workers = config.rollout.ranks
    users = config.rollout.nodes * workers + config.learner.ranks
    if workers > 1 and users > count:
        raise UserError(
            f"{config.rollout.nodes} rollout nodes of {workers} workers each (rollout.engine_args) and {config.learner.ranks} "
            f"learner ranks need {users} GPUs, and this machine has {count}: lower rollout.nodes, learner.ranks or the "
            "workers, or set rollout.gpus and learner.gpus for a cluster that has more."
        )
    share = 1.0 if users <= count else int(100 * count / users) / 100
    update: dict[str, Any] = {
        "rollout": config.rollout.model_copy(update={"gpus": share * workers}),
        "learner": config.learner.model_copy(update={"gpus": share}),
        "weightsync": config.weightsync.model_copy(update={"backend": "nccl" if share == 1.0 else "gloo"}),
    }
    return config.model_copy(update=update)
