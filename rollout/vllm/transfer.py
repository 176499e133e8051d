"""Weights into vLLM's workers: a backend for vLLM's weight-transfer interface, registered when this module is imported.

No tensor goes through a call. `weights` says where they are: a file in memory that the node holds open (`handover.py`). One
bracket (start, load, finish) per update: vLLM restores each layer's loadable form, and packs it again when it is complete.
What is loaded was compared with the model's names, shapes and dtypes before the bracket began: vLLM itself takes a missing name
without a word. Whatever fails inside of the bracket leaves the worker with mixed weights: the engine must end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollout.vllm.handover import open_tensors

BACKEND = "segue"


@dataclass
class SegueInit(WeightTransferInitInfo):
    """Nothing is set up ahead of time."""


@dataclass
class SegueUpdate(WeightTransferUpdateInfo):
    """Where the weights are, and [name, dtype, shape, offset in bytes] of each tensor, in the order they are loaded in."""

    path: str
    size: int
    plan: list[list[Any]]


class SegueTransfer(WeightTransferEngine[SegueInit, SegueUpdate]):
    """See the module."""

    init_info_cls, update_info_cls = SegueInit, SegueUpdate

    def init_transfer_engine(self, init_info: SegueInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Take the layers apart."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SegueUpdate) -> None:
        """Load everything. The tensors are views of a mapping that lives as long as any loader holds one of them."""
        self.model.load_weights(open_tensors(update_info.path, update_info.size, update_info.plan))

    def finish_weight_update(self) -> None:
        """Put the layers together again."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_tied_head()

    def _repack_tied_head(self) -> None:
        """On CPUs a head that is tied to the embedding keeps a packed copy of its own, which the bracket does not refresh."""
        if self.device.type != "cpu":
            return
        modules = list(self.model.modules())
        embeddings = {m.weight.data_ptr() for m in modules if type(m) is VocabParallelEmbedding}
        for module in modules:
            if isinstance(module, ParallelLMHead) and module.weight.data_ptr() in embeddings:
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing is held."""


WeightTransferEngineFactory.register_engine(BACKEND, SegueTransfer)
