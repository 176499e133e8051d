"""What is read when somebody asks: this process by the kernel, GPUs by NVML. NVML is the edge: a stand-in for its module."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from segue.metrics import Metrics
from segue.metrics.gpus import gpu_reader
from segue.metrics.process import read_process, read_starts
from segue.metrics.vocabulary import RESTART_REASONS

UUIDS = ("GPU-1", "GPU-2")


class NVMLError(Exception):
    pass


class FakeNvml(ModuleType):
    """Two GPUs; `lost` ones raise, as after a fault of the hardware."""

    NVMLError = NVMLError

    def __init__(self, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.driver = driver
        self.lost: set[str] = set()
        self.util = {"GPU-1": 75, "GPU-2": 0}

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.util:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        if handle in self.lost:
            raise NVMLError("GPU is lost")
        return SimpleNamespace(gpu=self.util[handle], memory=0)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=1 << 30, total=4 << 30)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_gpus_are_read_by_their_uuid(nvml: FakeNvml) -> None:
    metrics = Metrics("learner", gpus=UUIDS)
    reader = gpu_reader(metrics.gpus)
    assert reader is not None
    metrics.attach_reader(reader)
    samples = metrics.snapshot()
    assert samples['segue_gpu_utilization_ratio{UUID="GPU-1"}'] == 0.75
    assert samples['segue_gpu_utilization_ratio{UUID="GPU-2"}'] == 0.0
    assert samples['segue_gpu_memory_used_bytes{UUID="GPU-2"}'] == 1 << 30
    assert samples['segue_gpu_memory_size_bytes{UUID="GPU-2"}'] == 4 << 30
    nvml.util["GPU-1"] = 10
    assert metrics.snapshot()['segue_gpu_utilization_ratio{UUID="GPU-1"}'] == 0.1


def test_a_gpu_that_is_lost_is_told_of_once_and_the_other_goes_on(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    reader = gpu_reader(UUIDS)
    assert reader is not None
    nvml.lost = {"GPU-1"}
    for _ in range(3):
        assert {labels["UUID"] for _, labels, _ in reader()} == {"GPU-2"}
    assert [record.message for record in caplog.records] == ["NVML says nothing more of GPU-1 (GPU is lost)."]


def test_without_gpus_nothing_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level(logging.INFO):
        assert gpu_reader(()) is None
    assert caplog.records == []


@pytest.mark.parametrize(
    ("module", "said"),
    [(None, "there is no module pynvml"), (FakeNvml(driver=False), "Driver Not Loaded")],
    ids=["no module", "no driver"],
)
def test_without_nvml_one_sentence_is_said(
    module: FakeNvml | None, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with caplog.at_level(logging.INFO):
        assert gpu_reader(UUIDS) is None
    assert len(caplog.records) == 1 and said in caplog.text and "dcgm-exporter" in caplog.text


def test_a_gpu_that_nvml_does_not_know_is_one_sentence(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    assert gpu_reader(("GPU-9",)) is None
    assert len(caplog.records) == 1 and "Not Found" in caplog.text


def test_why_a_process_was_started_again_is_told_by_the_one_that_was() -> None:
    metrics = Metrics("rollout")
    metrics.attach_reader(lambda: read_starts(4, {"silent": 2, "host_lost": 1}))
    samples = metrics.snapshot()
    assert samples["segue_process_starts"] == 4
    told = {reason: samples[f'segue_process_restarts_total{{reason="{reason}"}}'] for reason in RESTART_REASONS}
    assert told == {"died": 0, "silent": 2, "engine": 0, "host_lost": 1}


def test_this_process_is_read_from_the_kernel() -> None:
    metrics = Metrics("scheduler")
    metrics.attach_reader(read_process)
    first = metrics.snapshot()
    sum(range(300_000))
    second = metrics.snapshot()
    assert 0.0 < first["segue_process_cpu_seconds_total"] < second["segue_process_cpu_seconds_total"]
    assert 1 << 20 < second["segue_process_resident_memory_bytes"] < 1 << 38
