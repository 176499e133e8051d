"""Random events against the core: whatever happens in whatever order, its promises hold and it never stalls (design.md §4)."""

from __future__ import annotations

from typing import Any

import pytest
from core_world import ModelLease, ModelNode, World, make_config, task
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from scheduler.core import events as e
from segue.episode import State
from segue.ports.rollout import DeltaHead, Discarded, Finish, SliceUsed

ANY = st.integers(0, 1 << 30)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Small settings, the smallest included: B = 2 or 1, two places, η = 0."""
    mode = draw(st.sampled_from(["async", "async", "sync", "one_step_off"]))
    size = draw(st.integers(2, 4))
    extra = draw(st.sampled_from([0, 0, 1, 2, 3]))
    sections: dict[str, Any] = {
        "mode": mode,
        "steps": draw(st.integers(3, 30)),
        "group__size": size,
        "group__redundancy": extra,
        "group__min_valid": draw(st.integers(0, size)),
        "group__filter_zero_variance": draw(st.booleans()),
        "batch__groups": draw(st.integers(1, 3)),
        "learner__mask_outcomes": draw(st.sampled_from([[], [], ["truncated_turns"]])),
        "staleness__over_age": draw(st.sampled_from(["mask", "drop", "train"])),
        "rollout__max_episodes": draw(st.integers(-(-(size + extra) // 2) if extra else 1, 5)),
        "update__inflight": draw(st.sampled_from(["recompute", "keep", "turn", "episode"])),
        "scheduler__retries_infra": draw(st.integers(0, 2)),
        "scheduler__retries_env": draw(st.integers(0, 2)),
        "scheduler__max_quarantined": 100_000,
        "task__train_tasks": 100_000,
    }
    if mode == "async":
        sections["staleness__max_age"] = age = draw(st.integers(0, 3))
        sections["data__prefetch"] = draw(st.integers(0, min(1, age)))
        if age and draw(st.booleans()):
            sections |= {
                "update__policy": "budget",
                "update__reprefill_window": 20.0,
                "update__budget_inflight": ["turn", "keep"],
            }
        sections["update__rolling"] = draw(st.sampled_from([0.3, 0.5, 1.0]))
    return sections


class Course(RuleBasedStateMachine):
    """One run. `world` checks the promises after every event; `drain` proves that there is no stall."""

    world: World

    @initialize(sections=configs(), auto=st.booleans())
    def begin(self, sections: dict[str, Any], auto: bool) -> None:
        self.world = World(make_config(**sections), auto_tasks=auto)
        self.world.join("rollout-0")
        self.world.join("rollout-1")
        self.world.send(e.TrainingOpened(self.world.config.steps))
        self.world.publish()

    # --- picking --------------------------------------------------------------------------------------------------------

    def _node(self, pick: int) -> ModelNode | None:
        nodes = list(self.world.nodes.values())
        return nodes[pick % len(nodes)] if nodes else None

    def _lease(self, pick: int) -> tuple[ModelNode, ModelLease] | None:
        pairs = [(node, lease) for node in self.world.nodes.values() for lease in node.leases.values() if node.version >= 0]
        return pairs[pick % len(pairs)] if pairs else None

    def _updating(self, pick: int) -> ModelNode | None:
        nodes = [node for node in self.world.nodes.values() if node.update is not None]
        return nodes[pick % len(nodes)] if nodes else None

    def running(self) -> bool:
        return not self.world.fatals

    # --- the ordinary course --------------------------------------------------------------------------------------------

    @precondition(running)
    @rule(things=st.integers(1, 25))
    def go_on(self, things: int) -> None:
        """Much goes well most of the time."""
        for _ in range(things):
            self.world.serve()

    @precondition(running)
    @rule(tokens=st.integers(1, 3))
    def everybody_samples(self, tokens: int) -> None:
        for node in list(self.world.nodes.values()):
            for lease in list(node.leases.values()):
                if node.version >= 0:
                    self.world.delta(node, lease, tokens=tokens)

    @precondition(running)
    @rule()
    def step_and_update(self) -> None:
        """A batch is trained if there is one, and its weights arrive everywhere while episodes run."""
        if self.world.trained in self.world.plans:
            self.world.take()
            self.world.train()
        self.world.update_all()

    # --- nodes ----------------------------------------------------------------------------------------------------------

    @precondition(running)
    @rule(name=st.sampled_from(["rollout-0", "rollout-1", "rollout-2"]), places=st.integers(1, 4))
    def join(self, name: str, places: int) -> None:
        self.world.join(name, places)

    def stable(self) -> bool:
        """Not in the middle of so much trouble that the core is about to give up, rightly."""
        return not self.world.fatals and self.world.core.updates.barren < 3

    @precondition(stable)
    @rule(pick=ANY)
    def die_silently(self, pick: int) -> None:
        if (node := self._node(pick)) is not None:
            del self.world.nodes[node.name]

    @precondition(stable)
    @rule(pick=ANY)
    def known_dead(self, pick: int) -> None:
        if (node := self._node(pick)) is not None:
            del self.world.nodes[node.name]
            self.world.send(e.NodeLost(node.name, node.session, "killed"))

    @precondition(running)
    @rule(seconds=st.floats(0.0, 100.0), heard=st.sampled_from([True, True, True, False]))
    def time_passes(self, seconds: float, heard: bool) -> None:
        for node in self.world.nodes.values():
            if heard:
                self.world.heard(node)
        self.world.advance(min(seconds, 10.0) if heard else seconds)

    @precondition(running)
    @rule(share=st.floats(0.0, 1.0), seconds=st.integers(1, 5))
    def contexts_are_computed_again(self, share: float, seconds: int) -> None:
        for _ in range(seconds):
            self.world.advance(1.0)
            for node in list(self.world.nodes.values()):
                self.world.spend(node, 10.0, share)

    @precondition(running)
    @rule()
    def tasks_come(self) -> None:
        if self.world.wanted_tasks:
            self.world.give_tasks()

    # --- episodes -------------------------------------------------------------------------------------------------------

    @precondition(running)
    @rule(pick=ANY, tokens=st.integers(0, 5), record=st.booleans(), reward=st.sampled_from([0.0, 0.5]))
    def turn(self, pick: int, tokens: int, record: bool, reward: float) -> None:
        if (found := self._lease(pick)) is not None:
            self.world.delta(*found, tokens=tokens, record=record, reward=reward if record else 0.0)

    @precondition(running)
    @rule(pick=ANY, outcome=st.sampled_from(["terminated", "truncated_turns"]), reward=st.sampled_from([0.0, 1.0]))
    def finish(self, pick: int, outcome: str, reward: float) -> None:
        if (found := self._lease(pick)) is not None:
            self.world.delta(*found, tokens=1, reward=reward)
            if found[1].grant.episode in found[0].leases:
                self.world.finish(*found, outcome=outcome)

    @precondition(running)
    @rule(pick=ANY, failure=st.sampled_from(["infra", "env", "data", "?"]))
    def fail(self, pick: int, failure: str) -> None:
        if (found := self._lease(pick)) is not None:
            self.world.fail(*found, failure=failure)

    @precondition(running)
    @rule(pick=ANY)
    def slice_used(self, pick: int) -> None:
        if (found := self._lease(pick)) is not None:
            self.world.send(SliceUsed(*found[1].key))

    @precondition(running)
    @rule()
    def all_slices_used(self) -> None:
        for node in list(self.world.nodes.values()):
            for lease in list(node.leases.values()):
                if node.version >= 0:
                    self.world.send(SliceUsed(*lease.key))

    @precondition(running)
    @rule(pick=ANY)
    def park(self, pick: int) -> None:
        if (found := self._lease(pick)) is not None and found[1].park:
            self.world.park(*found)

    @precondition(running)
    @rule(pick=ANY)
    def forgotten(self, pick: int) -> None:
        if (found := self._lease(pick)) is not None:
            found[0].leases.pop(found[1].grant.episode)
            self.world.send(Discarded(*found[1].key))

    @precondition(running)
    @rule(pick=ANY)
    def gap(self, pick: int) -> None:
        if (found := self._lease(pick)) is not None:
            lease = found[1]
            out = self.world.send(DeltaHead(*lease.key, lease.seq + 1, lease.turn, ((0, 1),)))
            assert out, "what comes after a gap is not accepted"

    @precondition(running)
    @rule(pick=ANY, version=st.sampled_from([-1, 10**6]))
    def untrue_stamp(self, pick: int, version: int) -> None:
        if (found := self._lease(pick)) is not None:
            lease = found[1]
            assert self.world.send(DeltaHead(*lease.key, lease.seq, lease.turn, ((version, 1),)))

    @precondition(running)
    @rule(pick=ANY)
    def untrue_totals(self, pick: int) -> None:
        if (found := self._lease(pick)) is not None:
            lease = found[1]
            self.world.send(Finish(*lease.key, lease.seq, "terminated", 1, lease.reward + 5.0, 0, 1.0))

    @precondition(running)
    @rule(pick=ANY)
    def late_or_twice(self, pick: int) -> None:
        history = self.world.history
        if history:
            self.world.send(history[pick % len(history)])

    # --- updates --------------------------------------------------------------------------------------------------------

    @precondition(running)
    @rule(pick=ANY)
    def load(self, pick: int) -> None:
        if (node := self._updating(pick)) is not None:
            self.world.load(node)

    @precondition(stable)
    @rule(pick=ANY, fatal=st.booleans())
    def load_fails(self, pick: int, fatal: bool) -> None:
        if (node := self._updating(pick)) is not None:
            self.world.load_fails(node, fatal)

    @precondition(lambda self: bool(self.world.fatals))
    @rule()
    def over(self) -> None:
        """The core has given the run up, for a reason that it named."""
        assert all(fatal.sentence for fatal in self.world.fatals)

    @precondition(stable)
    @rule(ok=st.sampled_from([True, True, True, False]), pick=ANY)
    def sent(self, ok: bool, pick: int) -> None:
        transfer = self.world.sending
        if transfer is not None:
            self.world.sent(ok, [] if ok or pick % 3 == 0 else [transfer.members[pick % len(transfer.members)]])

    @precondition(stable)
    @rule()
    def sender_unreachable(self) -> None:
        if self.world.transfers:
            self.world.send(e.SendFailed(self.world.transfers.pop(0).transfer, "no answer"))

    # --- learner --------------------------------------------------------------------------------------------------------

    @precondition(running)
    @rule()
    def publish(self) -> None:
        self.world.publish()

    @precondition(running)
    @rule(commit=st.booleans())
    def train(self, commit: bool) -> None:
        if self.world.trained in self.world.plans:
            self.world.take()
            self.world.train()
            if commit:
                self.world.commit()

    @precondition(running)
    @rule(pick=ANY)
    def rewind(self, pick: int) -> None:
        world = self.world
        if pick % 4 == 0 and world.trained > world.committed:
            world.rewind(world.committed + pick // 8 % (world.trained - world.committed))
            if pick % 8:
                world.publish()

    @precondition(lambda self: self.running() and self.world.cut is not None)
    @rule(pick=ANY)
    def crash_and_resume(self, pick: int) -> None:
        if pick % 3 == 0:
            self.world.crash_and_resume()

    @precondition(running)
    @rule(step=st.integers(-1, 40))
    def learner_confused(self, step: int) -> None:
        """A report that cannot be true changes nothing."""
        world = self.world
        before = dict(world.core.tables.episodes.counts)
        if not world.trained <= step < world.core.progress.formed:
            with pytest.raises(ValueError):
                world.send(e.BatchTaken(step))
        if step > world.trained:
            with pytest.raises(ValueError):
                world.send(e.BatchTrained(step))
            with pytest.raises(ValueError):
                world.send(e.BatchesCommitted(step))
        assert before == world.core.tables.episodes.counts

    @precondition(running)
    @rule(n=st.integers(0, 3))
    def evaluate(self, n: int) -> None:
        name = f"eval-{len(self.world.core.evaluation.runs)}"
        self.world.send(e.EvalStarted(name, [task(900_000 + i) for i in range(n)], 0.0))

    @precondition(running)
    @rule()
    def drain(self) -> None:
        """Answered fairly, every course leads to the next batch, or to the end of training."""
        if self.world.trained < self.world.config.steps:
            self.world.drain(1)

    @precondition(running)
    @invariant()
    def deadline_is_ahead(self) -> None:
        due = self.world.core.next_deadline()
        assert due is None or due > self.world.now or due == pytest.approx(self.world.now)

    def teardown(self) -> None:
        if not hasattr(self, "world") or self.world.fatals or self.world.broken:
            return
        if self.world.trained < self.world.config.steps:
            self.world.drain(1)
        self.world.stopped = True
        self.world.send(e.StopRequested("the test is over"))
        counts = self.world.core.tables.episodes.counts
        assert not any(counts[s] for s in (State.PENDING, State.LEASED, State.PARKED, State.ASSEMBLING))
        self.world.advance(1000.0)
        assert self.world.core.next_deadline() is None, "with every node silent and no work, nothing is timed"


COURSE = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, report_multiple_bugs=False)


def test_random_courses() -> None:
    run_state_machine_as_test(Course, settings=settings(COURSE, max_examples=40, stateful_step_count=40))


@pytest.mark.full
def test_many_random_courses() -> None:
    run_state_machine_as_test(Course, settings=settings(COURSE, max_examples=2000, stateful_step_count=80))
