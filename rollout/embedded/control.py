"""What is done to a paused engine's model: weights are loaded, sequences scored; one at a time, in compute calls.

Whatever fails before the first weight changes leaves the old ones; what fails after that ends the engine, whose weights are a
mixture.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from rollout.embedded.meter import Meter
from rollout.embedded.runner import Runner
from rollout.embedded.watchdog import WatchedCompute
from rollout.fitting import bind, targets
from segue.clock import now
from segue.ports.engine import EngineDead
from segue.ports.weights import ArrivingWeights, StagedWeights


class Control:
    """See the module. `end` ends the engine and returns what is to be raised; `busy`: something of this is under way."""

    def __init__(self, watched: WatchedCompute, meter: Meter, end: Callable[[EngineDead], EngineDead]) -> None:
        self._watched = watched
        self._meter = meter
        self._end = end
        self.busy = False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        assert not self.busy
        self.busy = True
        try:
            yield
        finally:
            self.busy = False
            self._watched.rest()

    async def load(self, runner: Runner, version: int, weights: StagedWeights) -> None:
        """Put staged weights in. Raises `ValueError` for those that do not fit, `EngineDead` once some are in."""
        with self._alone():
            started = now()
            bindings = await self._watched.run(lambda: bind(runner.model, weights), 0.0)
            try:
                await self._watched.run(lambda: runner.load(version, bindings), 0.0)
            except BaseException as error:  # a cancelled wait leaves half-changed weights behind just as a failed copy does
                self._half_loaded(version, error)
        self._loaded(started)

    async def load_arriving(self, runner: Runner, weights: ArrivingWeights) -> None:
        """The same, bucket by bucket; what the transfer raises before the first one is passed on."""
        version, changed = weights.version, False
        with self._alone():
            try:
                own = await self._watched.run(lambda: targets(runner.model, version, weights.manifest), 0.0)
                async for tensors in weights.buckets():
                    bindings = [(own[name], tensor) for name, tensor in tensors.items() if name in own]
                    changed = True
                    started = now()
                    await self._watched.run(partial(runner.write, bindings), 0.0)
                    self._loaded(started)
                    del tensors, bindings
            except BaseException as error:
                if changed:
                    self._half_loaded(version, error)
                raise
        runner.version = version

    async def score(self, runner: Runner, tokens: list[int], cost: float) -> list[float]:
        """Log-probabilities of `tokens[1:]`; `cost` in logical seconds."""
        with self._alone():
            started = now()
            logprobs: list[float] = await self._watched.run(lambda: runner.score(tokens), cost)
        self._meter.control_seconds += now() - started
        self._meter.spent("score", now() - started)
        self._meter.scored_tokens += len(tokens)
        return logprobs

    def _loaded(self, started: float) -> None:
        self._meter.control_seconds += now() - started
        self._meter.spent("load", now() - started)

    def _half_loaded(self, version: int, error: BaseException) -> NoReturn:
        dead = EngineDead(f"loading version {version} ended half way: {type(error).__name__}: {error}")
        dead.__cause__ = error
        told = self._end(dead)
        if isinstance(error, asyncio.CancelledError):
            raise error
        raise told from error
