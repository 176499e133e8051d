"""Weights into vLLM's workers: our backend for vLLM's weight-transfer interface, registered when this module is imported.

Runs in a worker process of vLLM. There a thread receives and verifies buckets beside decoding (`worker.py`), ordered by the node
over a socket (`workers.py`); vLLM's interface is used for what it is made for:

    init_weight_transfer_engine   who this worker is, what its model looks like, and where the node listens
    start_weight_update           the node has paused the engine: layers are taken apart
    update_weights                what is held of a transfer (or arrives now, where nothing is staged) is loaded: full tensors, of
                                  which vLLM's loaders take their shard
    finish_weight_update          layers are put together again

One bracket (start, load, finish) per update: vLLM restores each layer's loadable form, and packs it again when it is complete. A
loader may keep views of a bucket until then; its memory is used again when nobody has one (`memory.py`). Names,
shapes and dtypes were compared before anything was sent; that every parameter was loaded is seen to here, since vLLM itself takes
a missing name without a word. Whatever fails inside of the bracket leaves the worker with mixed weights: the engine must end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from weightsync.manifest import Layout
from weightsync.receiver import TorchReceiver
from weightsync.worker import WorkerEnd

BACKEND = "segue"


@dataclass
class WorkerInit(WeightTransferInitInfo):
    """Plain values, as `WorkersReceiver` sends them to all workers. `members[i]` is worker i's name."""

    socket: str
    members: list[str]
    backend: str
    staging: str
    model_name: str
    expected: dict[str, Any]
    roll_call_seconds: float


@dataclass
class WorkerUpdate(WeightTransferUpdateInfo):
    """The transfer whose weights are to be loaded."""

    transfer: int


class SegueTransfer(WeightTransferEngine[WorkerInit, WorkerUpdate]):
    """See the module. All methods are called by vLLM, on the worker's main thread."""

    init_info_cls, update_info_cls = WorkerInit, WorkerUpdate
    _end: WorkerEnd | None = None

    def init_transfer_engine(self, init_info: WorkerInit) -> None:
        """Connect to the node; again, if it asks again."""
        self.shutdown()
        member = init_info.members[self.parallel_config.rank]
        buffers = self.device if init_info.backend == "nccl" else torch.device("cpu")

        def receiver(metrics: Any) -> TorchReceiver:
            return TorchReceiver(
                member,
                init_info.backend,
                buffers,
                metrics,
                engine_device=self.device,
                staging=init_info.staging,
                model_name=init_info.model_name,
                expected=msgspec.convert(init_info.expected, Layout),
                roll_call_seconds=init_info.roll_call_seconds,
            )

        self._end = WorkerEnd(init_info.socket, member, receiver)

    def start_weight_update(self) -> None:
        """Take the layers apart."""
        self._names = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: WorkerUpdate) -> None:
        """Load everything that is held of the transfer, or that arrives now."""
        assert self._end is not None, "weights are loaded before the node has connected this worker"
        loaded = self.model.load_weights(self._end.tensors(update_info.transfer))
        missing = sorted(self._names - loaded) if loaded is not None else []
        if missing and self.model_config.quantization is None:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise RuntimeError(f"vLLM's loader left {', '.join(missing[:3])}{more} as they were")

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
        """Leave the node and all groups."""
        end, self._end = self._end, None
        if end is not None:
            end.close()


WeightTransferEngineFactory.register_engine(BACKEND, SegueTransfer)
