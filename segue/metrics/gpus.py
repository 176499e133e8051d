"""What the driver says of the GPUs of this process, where nobody runs DCGM: NVML, read at every scrape, by UUID.

NVML (package nvidia-ml-py, module pynvml) is optional. Utilisation is the driver's: a kernel that spins in a collective counts
as work, so it never proves that work was useful; the state clock does (docs/monitoring.md, "Idle GPUs").
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from segue.metrics.registry import Reading

log = logging.getLogger(__name__)

_HINT = "install nvidia-ml-py, or run dcgm-exporter, which tells more"


def gpu_reader(uuids: Sequence[str]) -> Callable[[], Iterable[Reading]] | None:
    """A reader of these GPUs for `Metrics.attach_reader`; None, after one sentence in the log, where NVML is not to be had.

    None and silence where there are no GPUs.
    """
    if not uuids:
        return None
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        log.info("NVML does not tell how busy the GPUs are, because there is no module pynvml: %s.", _HINT)
        return None
    try:
        nvml.nvmlInit()
        handles = {uuid: nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids}
    except nvml.NVMLError as error:
        log.warning("NVML does not tell how busy the GPUs are (%s): %s.", error, _HINT)
        return None
    return _Reader(nvml, handles)


class _Reader:
    """Reads each GPU. One that stops answering is told of once, and left out from then on."""

    def __init__(self, nvml: Any, handles: dict[str, Any]) -> None:
        self._nvml = nvml
        self._handles = handles

    def __call__(self) -> list[Reading]:
        found: list[Reading] = []
        for uuid, handle in [*self._handles.items()]:
            try:
                used = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            except self._nvml.NVMLError as error:
                log.warning("NVML says nothing more of %s (%s).", uuid, error)
                self._handles.pop(uuid, None)
                continue
            labels = {"UUID": uuid}
            found.append(("segue_gpu_utilization_ratio", labels, used))
            found.append(("segue_gpu_memory_used_bytes", labels, float(memory.used)))
            found.append(("segue_gpu_memory_size_bytes", labels, float(memory.total)))
        return found
