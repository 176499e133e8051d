"""The closed form of docs/reprefill.md against the plainest simulation there is, and its corrections."""

from __future__ import annotations

import random

import pytest

from benchmarks.reprefill import WORKLOADS, parse, predicted, waits_factor


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


def test_updates_that_fall_into_one_wait_are_paid_once() -> None:
    rng = random.Random(3)
    gaps = [rng.expovariate(1.0) for _ in range(20_000)]
    times, now = [], 0.0
    for gap in gaps:
        now += gap
        times.append(now)
    at, paid, dropped, upto = 0.0, 0, 0, 0
    while at < times[-1] - 10:
        for length, waits in ((0.5, False), (2.0, True)):
            first = upto
            while times[upto] < at + length:
                upto += 1
            dropped += upto - first
            paid += min(1, upto - first) if waits else upto - first
            at += length
    assert paid / dropped == pytest.approx(waits_factor(0.5, 2.0, gaps), rel=0.03)
    assert waits_factor(1.0, 0.0, [1.0]) == 1.0
    assert waits_factor(0.0, 3.0, [1.0, 1.0]) == pytest.approx(1 / 3)


def test_the_default_is_the_three_workloads_of_the_claim() -> None:
    assert parse([]).workloads == ["short", "spread", "heavy"] and set(parse([]).workloads) < set(WORKLOADS)
