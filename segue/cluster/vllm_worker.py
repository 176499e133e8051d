"""What vLLM mixes into its workers: the engine's part (rollout), and the backend that weights come by (weightsync), which is
registered in the worker's process when this module is imported. Handed to the engine by name, as roles do not import each other.
"""

from __future__ import annotations

import weightsync.vllm_backend  # noqa: F401
from rollout.vllm.worker import Extension

__all__ = ["Extension"]
