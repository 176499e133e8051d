"""vLLM's worker extension with a switch for the tests: a loader that fails after some tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from segue.cluster.vllm_worker import Extension


class FaultyExtension(Extension):
    """As in production, until it is told to fail."""

    def segue_break_loader(self, after: int) -> None:
        """The next load fails after so many tensors, and only that one."""
        model: Any = self.model_runner.get_model()
        whole = model.load_weights

        def broken(weights: Iterable[tuple[str, Any]]) -> Any:
            model.load_weights = whole

            def some() -> Iterable[tuple[str, Any]]:
                for number, pair in enumerate(weights):
                    if number == after:
                        raise RuntimeError("the loader ran out of luck")
                    yield pair

            return whole(some())

        model.load_weights = broken
