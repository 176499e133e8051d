"""vLLM's engine (AsyncLLM) as the node uses it: started, asked, paused, loaded, ended.

Every request is its own; token ids go in, and what comes out is taken as it comes from vLLM's core process, step by step: with
the version of the weights that the core says it had in that step, and with the record of our scheduler (`scheduler.py`). vLLM's
own way of handing outputs to consumers merges steps and forgets their versions.

consumes     outputs of vLLM's core, in order, in a task of its own
produces     `on_step(versioned outputs)` for each, `on_death(sentence)` once
waits for    vLLM's answers to calls; the caller sets deadlines
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM

from rollout.vllm.handover import Handover
from rollout.vllm.leftovers import remove, shared_memory_of
from rollout.vllm.record import EXTRA, StepRecord
from rollout.vllm.starting import Printed, cause_of, first_words, not_started

log = logging.getLogger(__name__)

END_SECONDS = 3.0
"""Processes that have not ended so long after they were told to are killed: vLLM's often take longer than that to clean up."""

INSTALL_SECONDS = 60.0
"""For a worker that has just started to answer."""


@dataclass(slots=True)
class Output:
    """What a step gave a request. `scored`: log-probabilities of its prompt's tokens after the first, if it asked for them."""

    request: str
    tokens: list[int]
    logprobs: list[float]
    finish: str
    scored: list[float] | None = None


@dataclass(slots=True)
class Step:
    """A step of vLLM's core: `version` is what the core says of the weights it had, "default" before the first load."""

    version: str
    outputs: list[Output]
    record: StepRecord


class _Llm(AsyncLLM):
    """AsyncLLM whose outputs are taken by `Core._listen`."""

    def _run_output_handler(self) -> None:
        """AsyncLLM calls this when it is made, and before requests of its own; it has none."""


class Core:
    """One running vLLM. `start` and `stop` from one event loop; `on_step` and `on_death` are called on it."""

    def __init__(self, arguments: dict[str, Any], start_seconds: float = 600.0) -> None:
        """`arguments` are those of vLLM's `AsyncEngineArgs`; `start_seconds` is how long its start may take."""
        self._arguments = arguments
        self._start_seconds = start_seconds
        self._llm: _Llm | None = None
        self._listener: asyncio.Task[None] | None = None
        self._processes: list[psutil.Process] = []
        self._names: dict[psutil.Process, str] = {}
        self._shared: set[Path] = set()
        self._printed = Printed()
        self.dead = ""
        self.on_step: Callable[[Step], None] = lambda step: None
        self.on_death: Callable[[str], None] = lambda why: None

    async def start(self) -> None:
        """Start vLLM's processes. Raises `UserError` with the first cause if they do not start, or not in time."""
        before, printed = set(_children()), Printed()
        opening = asyncio.ensure_future(asyncio.to_thread(self._open))
        try:
            await asyncio.wait([opening], timeout=self._start_seconds)
        finally:
            self._processes = [process for process in _children() if process not in before]
        if not opening.done():
            opening.add_done_callback(lambda late: late.cancelled() or late.exception())
            await asyncio.to_thread(self._end)  # which ends the thread's wait, too
            late = f"it was not ready within {self._start_seconds:g} s"
            raise not_started(cause_of(printed.read()) or late)
        try:
            self._llm = opening.result()
        except Exception as error:
            log.exception("vLLM did not start")
            raise not_started(cause_of(printed.read()) or first_words(error)) from error
        self._listener = asyncio.get_running_loop().create_task(self._listen(), name="vllm-outputs")
        try:
            async with asyncio.timeout(INSTALL_SECONDS):
                problems = [problem for problem in await self.llm.collective_rpc("segue_install") if problem]
        except TimeoutError:
            raise not_started(f"its workers did not answer within {INSTALL_SECONDS:g} s") from None
        except Exception as error:
            raise not_started(cause_of(printed.read()) or first_words(error)) from error
        if problems:
            raise not_started(f"this vLLM cannot be used: {problems[0]}")
        self._names = {process: process.name() for process in self._processes if process.is_running()}
        self._shared = shared_memory_of(self.pids())
        self._printed.forget()

    def _open(self) -> _Llm:
        llm = _Llm.from_engine_args(AsyncEngineArgs(**self._arguments))
        assert isinstance(llm, _Llm)
        return llm

    @property
    def llm(self) -> AsyncLLM:
        """vLLM itself."""
        assert self._llm is not None, "the core was used before `start` had returned"
        return self._llm

    @property
    def block_size(self) -> int:
        """KV is found again in whole blocks of so many tokens."""
        return int(self.llm.vllm_config.cache_config.block_size)

    def pids(self) -> list[int]:
        """Of vLLM's processes, the innermost last."""
        return [process.pid for process in self._processes if process.is_running()]

    # --- outputs ----------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        client: Any = self.llm.engine_core
        while True:
            try:
                outputs = await client.get_output_async()
            except Exception as error:
                self._die(f"vLLM ended ({self._why(error)})")
                return
            try:
                self.on_step(_step(outputs))
            except Exception as error:  # a mistake of ours
                log.exception("a step of vLLM's could not be taken")
                self._die(f"{type(error).__name__} while a step of vLLM's was taken: {error}")
                return
            client.outputs_queue.task_done()
            self._printed.forget()

    def _why(self, error: Exception) -> str:
        """The first exception that its processes printed after the last step, else which of them is gone: vLLM's own error says
        to look above."""
        theirs = "\n".join(line for line in self._printed.read().splitlines() if line.startswith("("))  # (EngineCore pid=…) …
        cause = cause_of(theirs)
        if cause and not cause.endswith(": cancelled"):  # a worker's, whose core is gone
            return cause
        gone = [name for process, name in self._names.items() if not _lives(process)]
        return f"its process {' and '.join(gone)} died" if gone else first_words(error)

    def _die(self, why: str) -> None:
        if not self.dead:
            self.dead = why
            self.on_death(why)

    # --- requests ---------------------------------------------------------------------------------------------------

    async def submit(
        self, name: str, tokens: Sequence[int], params: SamplingParams, *, salt: str, priority: int, arrival: float
    ) -> None:
        """Hand a request to vLLM. Its outputs come by `on_step`; one that is aborted is in `StepRecord.ended`."""
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(tokens),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=arrival,
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
            priority=priority,
            external_req_id=name,
        )
        await self.llm.engine_core.add_request_async(request)

    async def abort(self, names: list[str]) -> None:
        """End requests; those that vLLM does not know are ignored."""
        await self.llm.engine_core.abort_requests_async(names)

    # --- control ----------------------------------------------------------------------------------------------------

    async def pause(self, *, keep: bool) -> None:
        """Return when vLLM stands still and every output has gone through `on_step`. `keep`: requests stay, with their KV."""
        client: Any = self.llm.engine_core
        await client.pause_scheduler_async(mode="keep" if keep else "abort", clear_cache=False)
        await client.outputs_queue.join()  # vLLM's answer came after all outputs, but by another way

    async def resume(self) -> None:
        await self.llm.resume_generation()

    async def connect_workers(self, info: dict[str, Any]) -> None:
        """Set up the weight-transfer backend of every worker."""
        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def load_staged(self, version: int, transfer: int) -> None:
        """Swap in what the workers hold of a transfer (or get now), while paused. After any exception weights may be mixed."""
        await self.llm.start_weight_update()
        await self.llm.update_weights(WeightTransferUpdateRequest(update_info={"transfer": transfer}))
        await self.llm.finish_weight_update(str(version))

    async def load_handover(self, version: int, handover: Handover) -> None:
        """The same with weights that lie in this process."""
        await self.llm.start_weight_update()
        await self.llm.collective_rpc("segue_load_handover", args=(handover.path, handover.size, handover.plan))
        await self.llm.finish_weight_update(str(version))

    # --- the end ----------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End vLLM's processes: by request, and after `END_SECONDS` by force."""
        self._die("the engine was stopped")
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        shared = self._shared | shared_memory_of(self.pids())  # also of a start that did not come to its end
        if self._llm is not None:
            self._llm.shutdown(timeout=END_SECONDS)
        _, alive = psutil.wait_procs(self._processes, timeout=END_SECONDS)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(alive, timeout=END_SECONDS)
        remove(shared)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _children() -> list[psutil.Process]:
    """All processes under this one, but for the resource tracker of Python's own, which lives as long as this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in word for word in process.cmdline()):
                found.append(process)
    return found


def _step(outputs: EngineCoreOutputs) -> Step:
    stats = outputs.scheduler_stats
    fields = stats.kv_connector_stats if stats is not None else None
    return Step(str(outputs.weight_version), [_output(o) for o in outputs.outputs], StepRecord.decode(fields or {}))


def _output(output: EngineCoreOutput) -> Output:
    logprobs = [] if output.new_logprobs is None else [float(x) for x in output.new_logprobs.logprobs[:, 0]]
    prompt = output.new_prompt_logprobs_tensors
    scored = None if prompt is None else [float(x) for x in prompt.logprobs[:, 0]]
    finish = "" if output.finish_reason is None else str(output.finish_reason)
    return Output(output.request_id, list(output.new_token_ids), logprobs, finish, scored)


def sampling(
    *, max_tokens: int, temperature: float, stop_tokens: Sequence[int] = (), extra: dict[str, Any], score_prompt: bool = False
) -> SamplingParams:
    """Parameters of a request: the log-probability of each sampled token, no text, and stops at our own tokens only."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        logprobs=0,
        prompt_logprobs=0 if score_prompt else None,
        detokenize=False,
        ignore_eos=True,
        stop_token_ids=list(stop_tokens),
        extra_args={EXTRA: extra},
    )


STOP, LENGTH, ABORT = str(FinishReason.STOP), str(FinishReason.LENGTH), str(FinishReason.ABORT)


def arrival_time() -> float:
    """Of a request that comes now, as vLLM orders those of equal priority."""
    return time.time()
