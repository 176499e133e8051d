"""The closed form of docs/reprefill.md against the plainest simulation there is, and its corrections."""

from __future__ import annotations

import random

import pytest

from benchmarks.reprefill import WORKLOADS, hit, parse, predicted


@pytest.mark.parametrize(("lengths", "prompt"), [((90, 110), 20), ((1, 199), 0), ((1, 199), 150), ((10, 10, 10, 370), 30)])
def test_the_prediction_is_what_episodes_that_grow_token_by_token_pay(lengths: tuple[int, ...], prompt: int) -> None:
    """50 places, a token per tick in each, an update per 40 finished episodes, and each pays its whole context then."""
    rng = random.Random(7)
    drawn = [float(rng.choice(lengths) if len(lengths) > 2 else rng.randint(*lengths)) for _ in range(60_000)]
    upcoming = iter(drawn)
    places, batch = 50, 40
    running = [[rng.random() * (length := next(upcoming)), length] for _ in range(places)]
    paid = trained = finished = updates = 0.0
    for _ in range(60_000):
        for place in running:
            place[0] += 1.0
            if place[0] >= place[1]:
                finished += 1
                trained += place[1]
                place[:] = [0.0, next(upcoming)]
        if finished >= batch * (updates + 1) + rng.random() * batch:
            updates += 1
            paid += sum(prompt + at for at, _ in running)
    mean = sum(drawn) / len(drawn)
    cv = (sum(x * x for x in drawn) / len(drawn) / mean**2 - 1) ** 0.5
    made_of = {"concurrent": places, "per_update": finished / updates, "cv": cv, "prompt": prompt, "length": mean}
    assert paid / trained == pytest.approx(predicted(**made_of, sampled=mean), rel=0.05)
    assert predicted(**made_of, sampled=mean / 2) == 2 * predicted(**made_of, sampled=mean)


def test_whether_an_update_falls_into_a_wait() -> None:
    rng = random.Random(3)
    gaps = [rng.expovariate(1.0) for _ in range(2_000)]
    times = [sum(gaps[: n + 1]) for n in range(len(gaps))]
    found = 0
    for _ in range(4_000):
        at = rng.uniform(0.0, times[-1] - 1.0)
        found += any(at <= time < at + 0.7 for time in times)
    assert hit(0.7, gaps) == pytest.approx(found / 4_000, abs=0.03)
    assert hit(3.0, [1.0, 2.0]) == 1.0 and hit(0.5, [1.0]) == 0.5 and hit(0.0, [1.0]) == 0.0


def test_the_default_is_the_three_workloads_of_the_claim() -> None:
    assert parse([]).workloads == ["short", "spread", "heavy"] and set(parse([]).workloads) < set(WORKLOADS)
