"""What runs come to where there is nothing to divide by: no figure, or one sentence."""

from __future__ import annotations

import pytest

from benchmarks.figures import Efficiency, Figures, Spread, Staleness, Wasted
from benchmarks.sweep_figures import Measured, arm_document
from segue.errors import RunFailed


def trained(tokens: int, seed: int) -> Measured:
    """A run of a second."""
    figures = Figures(
        steps=1,
        seconds=1.0,
        tokens_trained=tokens,
        tokens_sampled=tokens,
        tokens_per_second=float(tokens),
        step_seconds=Spread(1.0, 1.0, 1.0),
        idle_share={},
        state_share={},
        staleness=Staleness(0, None, None, None),
        prefill={},
        reprefill_share=None,
        wasted=Wasted(0, 0, 0, 0, 0, 0.0),
        length_bias=None,
    )
    return Measured(seed, figures)


def test_over_a_sync_run_that_trained_nothing_there_is_no_speedup() -> None:
    told = arm_document([trained(4, 0), trained(6, 1)], [trained(0, 0), trained(2, 1)])
    assert (told["speedup"], told["speedups"]) == (3.0, [3.0])
    assert arm_document([trained(4, 0)], [trained(0, 0)])["speedup"] is None


@pytest.mark.parametrize(("generation", "training", "name"), [(0.0, 5.0, "generation"), (5.0, 0.0, "training")])
def test_a_ceiling_of_nothing_is_one_sentence(generation: float, training: float, name: str) -> None:
    with pytest.raises(RunFailed, match=f"^With {name} alone no tokens were counted, so there is no ceiling: give more steps.$"):
        Efficiency(generation, training, 1.0)
    assert Efficiency(5.0, 4.0, 2.0).value == 0.5
