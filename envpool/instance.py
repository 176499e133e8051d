"""One environment instance and what is asked of it, one call at a time: the same code in a worker's thread and in serial mode."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from envpool.environment import DataError, Environment, Keyed, SimulatedCrash, Suite, Timed
from envpool.messages import Act, Acted, Call, Dispose, Disposed, Made, Make, Observed, Raised, Reply, Reset, RestoreTo
from segue.episode import FailureClass
from segue.ports.envpool import Observation, Resume, StepResult
from segue.users_code import described, kind, traceback_of


class Instance:
    """Owns one environment. What it raises becomes a `Raised`; after that only `Dispose` is meaningful."""

    def __init__(self, suite: Suite, make: Make, snapshot_bytes: int, defer: bool = False) -> None:
        self._suite = suite
        self._make = make
        self._snapshot_bytes = snapshot_bytes
        self._defer = defer
        self._environment: Environment | None = None
        self._timed: Timed | None = None
        self._keyed: Keyed | None = None

    def perform(self, call: Call) -> Reply:
        """Do what is asked, on the caller's thread. Raises only `SimulatedCrash`."""
        try:
            return self._perform(call)
        except SimulatedCrash:
            raise
        except DataError as error:
            return self._raised(call, FailureClass.DATA, error)
        except BaseException as error:  # also SystemExit: environments call code that calls sys.exit
            return self._raised(call, FailureClass.ENV, error)

    def owed(self) -> float:
        """Seconds the last call should still take (deferred environments only)."""
        return self._timed.owed() if self._timed is not None else 0.0

    def _raised(self, call: Call, failure: FailureClass, error: BaseException) -> Raised:
        owner = type(self._environment if self._environment is not None else self._suite)
        return Raised(call.instance, call.call, failure, described(error, owner), kind(error, owner), traceback_of(error))

    def _perform(self, call: Call) -> Reply:
        if isinstance(call, Dispose):
            return self._dispose(call)
        if isinstance(call, Make):
            self._environment = self._suite.make(call.task, call.member, call.attempt)
            if isinstance(self._environment, Keyed):
                self._keyed = self._environment
            if self._defer and isinstance(self._environment, Timed):
                self._timed = self._environment
                self._timed.defer()
            return Made(call.instance, call.call, Resume(self._environment.resume))
        environment = self._environment
        assert environment is not None, "an instance is made before it is used"
        if isinstance(call, Act):
            if self._keyed is not None:
                self._keyed.take_key(call.key)
            result = _checked_result(environment.step(call.action))
            return Acted(call.instance, call.call, result, self._snapshot() if call.snapshot else None)
        if isinstance(call, RestoreTo):
            observation = environment.restore(call.snapshot)
        else:
            assert isinstance(call, Reset)
            observation = environment.reset(self._make.task, self._make.task.seed)
        return Observed(call.instance, call.call, _checked(observation, Observation), self._snapshot())

    def _snapshot(self) -> bytes | None:
        assert self._environment is not None
        if self._environment.resume != Resume.SNAPSHOT:
            return None
        if not callable(getattr(self._environment, "snapshot", None)):
            raise TypeError("the environment's resume is 'snapshot', but it has no method snapshot")
        snapshot = self._environment.snapshot()
        if not isinstance(snapshot, bytes):
            raise TypeError(f"snapshot() returned {type(snapshot).__name__}, not bytes")
        return snapshot if len(snapshot) <= self._snapshot_bytes else None

    def _dispose(self, call: Dispose) -> Disposed:
        environment, self._environment = self._environment, None
        if environment is None:
            return Disposed(call.instance, call.call)
        try:
            environment.close()
        except BaseException as error:  # the instance is gone either way
            return Disposed(call.instance, call.call, described(error, type(environment)))
        return Disposed(call.instance, call.call)


def _plain(value: Any) -> Any:
    """The number in a NumPy or torch scalar, which environments return where the contract says float or bool."""
    if getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(f"the environment returned a {type(value).__name__} inside of its result")


def _checked(value: Observation, kind: type[Observation]) -> Observation:
    """`value` if it is what the contract says down to the last field; an environment is other people's code."""
    if not isinstance(value, kind):
        raise TypeError(f"the environment returned {type(value).__name__}, not {kind.__name__}")
    return msgspec.convert(msgspec.to_builtins(value, enc_hook=_plain), kind)


def _checked_result(result: StepResult) -> StepResult:
    if not isinstance(result, StepResult):
        raise TypeError(f"step() returned {type(result).__name__}, not StepResult")
    if result.terminated and result.truncated:
        raise ValueError("step() returned terminated and truncated together")
    result = msgspec.convert(msgspec.to_builtins(result, enc_hook=_plain), StepResult)
    if not math.isfinite(result.reward) or not all(map(math.isfinite, result.info.values())):
        raise ValueError(f"step() returned a reward of {result.reward} and info {result.info}: numbers must be finite")
    for message in result.observation.messages:
        message.content.encode()
    return result
