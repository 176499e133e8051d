"""Continuous batching as processor sharing, advanced analytically. Pure: no clock, no loop; times are handed in.

Between two events the batch is fixed: b requests with K tokens of context in all. A decoding step then takes c + h·K seconds,
with c = decode_seconds + decode_seconds_per_request · b, gives every request one token, and lets K grow by b. So n steps take

    T(n) = (c + h·K)·n + ½·h·b·n²

seconds (the sum over steps with n² for n·(n − 1): a continuous count of steps), which can be solved for n: nobody has to look at
single steps. Prefill goes first: what was admitted stalls the whole batch for its prefill seconds. Between events the engine does
one of the two.
"""

from __future__ import annotations

import math

from benchmarks.virtual.scenario import EngineModel

_ALMOST = 1e-6
"""Steps: what rounding of times may leave of one."""


class Batch:
    """The running requests, as numbers. `steps` counts decoding steps since the start, with a fraction; `tokens` is K.

    Lengths are in units of `unit` tokens: a step here is `unit` real ones.
    """

    def __init__(self, model: EngineModel, unit: int, now: float) -> None:
        self._fixed = model.decode_seconds * unit
        self._per_request = model.decode_seconds_per_request * unit
        self._per_token = model.decode_seconds_per_kv_token * unit * unit
        self._prefill = model.prefill_seconds_per_token * unit
        self._now = now
        self.requests = 0
        self.steps = 0.0
        self.tokens = 0.0
        self._stall = 0.0
        self.decode_seconds = 0.0
        self.prefill_seconds = 0.0

    def advance(self, now: float) -> None:
        """Let the time until `now` pass."""
        passed = now - self._now
        self._now = now
        if passed <= 0.0 or not self.requests:
            return
        if self._stall:
            stalled = min(self._stall, passed)
            self._stall -= stalled
            self.prefill_seconds += stalled
            passed -= stalled
            if passed <= 0.0:
                return
        self.decode_seconds += passed
        a = self._fixed + self._per_request * self.requests + self._per_token * self.tokens
        q = 0.5 * self._per_token * self.requests
        n = 2.0 * passed / (a + math.sqrt(a * a + 4.0 * q * passed))
        self.steps += n
        self.tokens += n * self.requests

    def skip(self, now: float) -> None:
        """The engine was paused until `now`."""
        self._now = now

    def join(self, context: int, prefilled: int) -> None:
        """A request with `context` tokens begins to decode once the `prefilled` ones of them are computed."""
        self.requests += 1
        self.tokens += context
        self._stall += prefilled * self._prefill

    def leave(self, tokens: float) -> None:
        """A request ends and takes its tokens, context and sampled ones, away."""
        self.requests -= 1
        self.tokens = self.tokens - tokens if self.requests else 0.0
        if not self.requests:
            self._stall = 0.0  # nobody waits for what was to be prefilled

    def seconds_to(self, step: float) -> float:
        """Seconds from the moment it was last advanced to until `steps` is `step`."""
        n = max(0.0, step - self.steps)
        a = self._fixed + self._per_request * self.requests + self._per_token * self.tokens
        return self._stall + a * n + 0.5 * self._per_token * self.requests * n * n

    def reached(self, step: float) -> bool:
        """Whether `steps` is `step`, as far as rounding lets one tell."""
        return self.steps >= step - _ALMOST

    def since(self, step: float) -> int:
        """Whole steps since `step`."""
        return int(self.steps - step + _ALMOST)

    def prefill_cost(self, tokens: int) -> float:
        """Seconds that prefilling takes."""
        return tokens * self._prefill
