"""`update.policy`: what re-prefill costs is read from the nodes; versions are held back, or cross another way, because of it."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from core_world import World, make_config, task
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core import events as e
from scheduler.core.bill import BUCKETS, Bill
from scheduler.core.meter import Meter
from scheduler.core.policy import UpdatePolicy
from segue.config.scheduler import UpdateConfig
from segue.errors import UserError

BUDGET = {"update__policy": "budget", "update__reprefill_budget": 0.1, "update__reprefill_window": 60.0}


def policy(max_age: int = 4, **options: Any) -> UpdatePolicy:
    return UpdatePolicy(UpdateConfig(policy="budget", reprefill_budget=0.1, **options), max_age)


# --- the bill -----------------------------------------------------------------------------------------------------------------


def test_a_share_is_of_the_nodes_time_in_the_window() -> None:
    """Two nodes; one recomputes 2 of 10 s, the other nothing: 2 / 20. Later it is forgotten."""
    bill = Bill(Meter(), 60.0)
    for name in ("a", "b"):
        bill.said(name, 1, 0.0, 0.0, 0.0)
    bill.said("a", 1, 500.0, 2.0, 10.0)
    bill.said("b", 1, 0.0, 0.0, 10.0)
    assert bill.share(10.0) == pytest.approx(0.1)
    assert (bill.tokens, bill.seconds) == (500, 2.0)
    for now in range(20, 101, 10):
        bill.said("a", 1, 500.0, 2.0, float(now))
        bill.said("b", 1, 0.0, 0.0, float(now))
    assert bill.share(100.0) == 0.0
    assert Bill(Meter(), 1.0).share(0.0) == 0.0


def test_a_node_process_that_begins_anew_is_not_charged_again() -> None:
    """A new session of the same process goes on with its totals; a new process begins at nothing."""
    bill = Bill(Meter(), 60.0)
    bill.said("a", 1, 100.0, 1.0, 1.0)
    bill.said("a", 2, 150.0, 1.5, 2.0)
    assert (bill.tokens, bill.seconds) == (150, 1.5)
    bill.said("a", 3, 20.0, 0.2, 9.0)
    assert bill.tokens == 170 and bill.seconds == pytest.approx(1.7)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_the_window_agrees_with_a_list_of_everything(seed: int) -> None:
    """But for the grain of its buckets."""
    rng = random.Random(seed)
    window, now, total = 30.0, 0.0, 0.0
    bill = Bill(Meter(), window)
    bill.said("a", 1, 0.0, 0.0, now)
    past: deque[tuple[float, float, float]] = deque()
    for _ in range(400):
        gap = rng.choice([0.1, 0.5, 3.0])
        now += gap
        spent = rng.uniform(0.0, gap)
        total += spent
        bill.said("a", 1, 0.0, total, now)
        past.append((now, spent, gap))
        grain = window / BUCKETS + 3.0
        shares = []
        for length in (window - grain, window + grain):
            inside = [(s, g) for when, s, g in past if when > now - length]
            shares.append((sum(s for s, _ in inside), sum(g for _, g in inside)))
        share = bill.share(now)
        assert shares[0][0] / shares[1][1] - 1e-9 <= share <= shares[1][0] / max(shares[0][1], 1e-9) + 1e-9


# --- decisions ----------------------------------------------------------------------------------------------------------------


def test_every_releases_everything_and_never_changes_the_way_across() -> None:
    every = UpdatePolicy(UpdateConfig(budget_inflight=("turn", "keep")), 4)
    assert not every.holds
    for behind in range(-1, 9):
        for share in (0.0, 0.5, 1.0):
            assert every.release(behind, False, share) and every.inflight == "recompute"


def test_over_the_budget_versions_wait_until_age_or_need_forbids_it() -> None:
    budget = policy()
    assert budget.release(1, False, 0.1), "within the budget"
    assert not any(budget.release(behind, False, 0.11) for behind in (1, 2, 3))
    assert budget.inflight == "recompute"
    assert budget.release(2, True, 0.11), "something waits for it"
    assert policy().release(4, False, 0.11), "η behind"
    assert policy().release(0, False, 0.11), "other weights of the same step: the learner went back"


def test_where_coalescing_is_not_enough_updates_cross_more_cheaply_and_back() -> None:
    budget = policy(budget_inflight=("turn", "keep"))
    ways = []
    for share in (0.3, 0.3, 0.3, 0.08, 0.04, 0.04, 0.04):
        assert budget.release(4, False, share)
        ways.append(budget.inflight)
    assert ways == ["turn", "keep", "keep", "keep", "turn", "recompute", "recompute"]


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        ({"budget_inflight": ()}, {"recompute"}),
        ({"inflight": "turn", "budget_inflight": ("turn", "keep")}, {"turn", "keep"}),
        ({"inflight": "keep", "budget_inflight": ("turn",)}, {"keep"}),
        ({"inflight": "episode"}, {"episode"}),
    ],
)
def test_only_what_saves_something_and_is_allowed_is_taken(options: dict[str, Any], ways: set[str]) -> None:
    budget = policy(**options)
    seen = {budget.inflight}
    for _ in range(3):
        budget.release(4, False, 1.0)
        seen.add(budget.inflight)
    assert seen == ways


@pytest.mark.parametrize(("options", "words"), [({"mode": "sync"}, "mode = 'sync'"), ({"staleness__max_age": 0}, "max_age = 0")])
def test_without_slack_in_age_a_budget_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_config(update__policy="budget", **options)


# --- in the core --------------------------------------------------------------------------------------------------------------


def spent(world: World, share: float, seconds: float = 10.0) -> None:
    """So much of the nodes' time went into re-prefill."""
    for _ in range(int(seconds)):
        world.advance(1.0)
        for node in world.nodes.values():
            world.spend(node, 100.0 * share, share)


def world_of(**sections: Any) -> World:
    options: dict[str, Any] = {"staleness__max_age": 4, "rollout__max_episodes": 2, **BUDGET, **sections}
    world = World(make_config(**options))
    for index in range(2):
        world.join(f"rollout-{index}", 2)
    world.send(e.TrainingOpened(1000))
    world.update_all()
    spent(world, 0.0)
    return world


def step(world: World) -> bool:
    """Train one batch and publish; whether an update began."""
    world.one_step()
    world.publish()
    begun = world.sending is not None
    world.settle_updates()
    return begun


def test_an_expensive_run_gets_fewer_updates_and_never_weights_older_than_the_bound() -> None:
    world = world_of(update__budget_inflight=[])
    assert step(world)
    spent(world, 0.3, 30.0)
    begun = [step(world) for _ in range(12)]
    assert begun == [False, False, False, True] * 3, "each time the nodes are η = 4 steps behind"
    assert world.tally("updates_coalesced", "reprefill") == 9
    assert world.tally("updates_coalesced", "busy") == 0
    assert world.tally("updates", "recompute") == 4


def test_a_held_version_goes_out_when_the_share_has_fallen() -> None:
    world = world_of()
    spent(world, 0.3, 20.0)
    assert not step(world)
    spent(world, 0.0, 25.0)
    assert not world.transfers, "6 of 55 s"
    spent(world, 0.0, 30.0)
    assert world.transfers
    world.settle_updates()
    assert all(node.version == world.core.tables.versions.newest for node in world.nodes.values())


def test_an_evaluation_does_not_wait_for_the_budget() -> None:
    """It is of the newest weights, which must come."""
    world = world_of()
    spent(world, 0.3, 20.0)
    assert not step(world)
    for node in world.nodes.values():  # somebody has room
        for lease in list(node.leases.values())[:1]:
            world.delta(node, lease)
            world.finish(node, lease)
    world.send(e.EvalStarted("after", [task(900_000 + i) for i in range(2)], 0.0))
    assert world.sending is not None


def test_the_way_across_is_told_with_each_update() -> None:
    world = world_of(update__budget_inflight=["turn", "keep"])
    spent(world, 0.3, 30.0)
    for _ in range(12):
        step(world)
    ways = [world.tally("updates", way) for way in ("turn", "keep", "recompute")]
    assert ways == [1, 2, 0]
    spent(world, 0.0, 70.0)
    step(world)
    assert world.tally("updates", "turn") == 2 and world.core.updates.policy.inflight == "turn"


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_every_is_untouched_by_any_bill(share: float) -> None:
    world = world_of(update__policy="every")
    spent(world, share, 20.0)
    assert all(step(world) for _ in range(6))
    assert world.core.updates.bill.share(world.now) == pytest.approx(share, abs=0.4)
    assert world.tally("updates", "recompute") == 6


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_coalescing_reduces_updates_and_never_stalls(data: st.DataObject) -> None:
    """The same course under both policies: under a budget no more updates, as many batches, and never η steps behind or more."""
    age = data.draw(st.integers(1, 4), "η")
    bills = data.draw(st.lists(st.floats(0.0, 0.9), min_size=4, max_size=12), "shares")
    rolling = data.draw(st.sampled_from([0.5, 1.0]), "rolling")
    updates = {}
    for kind in ("every", "budget"):
        world = world_of(update__policy=kind, staleness__max_age=age, update__rolling=rolling)
        for share in bills:
            spent(world, share, 5.0)
            world.drain(1)
        updates[kind] = sum(world.core.tables.tally.under("updates").values())
        assert world.trained == len(bills)
    assert updates["budget"] <= updates["every"]
