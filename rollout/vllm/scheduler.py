"""vLLM's scheduler, with books and with a lane of its own for scoring. Runs in vLLM's core process; named in `scheduler_cls`.

vLLM tells per request only the first admission's cached tokens, and of preempted requests nothing at all; here every admission
is written down as it is scheduled. What a step computed in all is counted apart, from what the workers sampled (`account.py`).
And a paused vLLM computes nothing: a request whose id begins with `SCORE_PREFIX` is run although all others stand still, on
blocks of KV that are kept for that alone.

vLLM does not promise this interface: whatever of it is used is used here, in `core.py`, in `worker.py` and in
`weightsync/vllm_backend.py` alone.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

from rollout.vllm.account import Account
from rollout.vllm.lifeline import end_with_parent
from rollout.vllm.record import SCORE_PREFIX, SETTINGS

_Mixin: Any = object  # whose super() is one of vLLM's schedulers


class _Segue(_Mixin):
    """Mixed into vLLM's schedulers; these are their attributes."""

    kv_cache_manager: Any
    waiting: Any
    kv_holding_waiting: Any
    deferred_waiting: set[Any]
    running: list[Any]
    _pause_state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        super().__init__(*args, **kwargs)
        self._account = Account()
        self._steps: list[tuple[float, bool]] = []  # those under way: when it began, whether it scores
        self._frozen: tuple[Any, ...] | None = None  # what stands still while sequences are scored
        pool = self.kv_cache_manager.block_pool
        tokens = self.vllm_config.additional_config[SETTINGS]["score_tokens"]
        groups = self.kv_cache_config.kv_cache_groups
        count = sum(-(-tokens // group.kv_cache_spec.block_size) + 1 for group in groups)
        self._kept = pool.get_new_blocks(count)
        self.kv_cache_manager.log_stats = True  # its own prefix statistics: what is found again is counted there
        self.kv_cache_manager.prefix_cache_stats = PrefixCacheStats()

    # --- books ------------------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        output = super().schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            self._account.admit(new.req_id, self.requests[new.req_id].num_tokens, new.num_computed_tokens)
        for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request in cached.resumed_req_ids:
                self._account.admit(request, self.requests[request].num_tokens, computed)
        self._account.scheduled(output.num_scheduled_tokens.items())
        stats = self.kv_cache_manager.make_prefix_cache_stats()
        self._account.looked_up(stats.hits + stats.preempted_hits, stats.preempted_queries - stats.preempted_hits)
        if output.num_scheduled_tokens:
            self._steps.append((began, self._frozen is not None))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if tokens := scheduler_output.total_num_scheduled_tokens:
            rows = sum(len(sampled) > 0 for sampled in model_runner_output.sampled_token_ids)
            began, scores = self._steps.pop(0)
            self._account.computed(began, time.monotonic(), tokens, rows, scores)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._thaw()
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        record = self._account.take().encode()
        return SchedulerStats(kv_connector_stats=record) if record else None

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._account.preempted(request.request_id)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._account.aborted(request.request_id)
        self._thaw()
        return finished

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._account.finished(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    # --- scoring ----------------------------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        if request.request_id.startswith(SCORE_PREFIX):
            self._freeze()
        super().add_request(request)

    def _freeze(self) -> None:
        """Set everything aside that is paused, and open the lane."""
        if self._frozen is not None:
            return
        assert self._pause_state != PauseState.UNPAUSED, "sequences are scored while the engine is paused"
        self._frozen = (self.waiting, self.kv_holding_waiting, self.deferred_waiting, self.running, self._pause_state)
        self.waiting, self.kv_holding_waiting = create_request_queue(self.policy), create_request_queue(self.policy)
        self.deferred_waiting, self.running, self._pause_state = set(), [], PauseState.UNPAUSED
        self.kv_cache_manager.block_pool.free_blocks(self._kept)  # unhashed blocks are taken first: nobody's prefix is evicted

    def _thaw(self) -> None:
        """Once nothing is scored any more, put everything back."""
        if self._frozen is None or self.running or self.waiting or self.kv_holding_waiting:
            return
        self.waiting, self.kv_holding_waiting, self.deferred_waiting, self.running, self._pause_state = self._frozen
        self._frozen = None
        pool = self.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in self._kept})
        assert all(block.ref_cnt == 0 for block in self._kept)
        pool.touch(self._kept)


class SyncScheduler(_Segue, Scheduler):
    """One step at a time: CPUs."""


class OverlappingScheduler(_Segue, AsyncScheduler):
    """The next step is scheduled while one is computed: GPUs."""
