"""The registry accepts what the catalogue declares, refuses everything else, and adds up."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from segue.metrics import BuildInfo, Metrics, StateClock
from segue.metrics.registry import Reading, UndeclaredMetric
from segue.metrics.samples import read_sample
from segue.metrics.vocabulary import ROLES, STATES

AGE = "segue_token_staleness_versions"


def scheduler() -> Metrics:
    return Metrics("scheduler", envs=("a", "b"))


def test_counters_gauges_and_histograms_hold_what_they_are_told() -> None:
    metrics = scheduler()
    metrics.add("segue_episodes_admitted_total", env="a")
    metrics.add("segue_episodes_admitted_total", 2, env="b")
    metrics.set("segue_episodes_state", 5, state="leased")
    metrics.set("segue_episodes_state", 3, state="leased")
    metrics.observe("segue_episode_duration_seconds", 0.3, env="a")
    metrics.observe("segue_episode_duration_seconds", 1e6, env="a")
    assert metrics.value("segue_episodes_admitted_total", env="a") == 1
    assert metrics.value("segue_episodes_admitted_total") == 3
    assert metrics.value("segue_episodes_state", state="leased") == 3
    assert metrics.value("segue_episode_duration_seconds", env="a") == 2
    assert metrics.sum("segue_episode_duration_seconds") == pytest.approx(1e6 + 0.3)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda m: m.add("segue_nonsense_total"), "the catalogue has no such metric"),
        (lambda m: m.add("segue_trained_tokens_total"), "scheduler does not export it"),
        (lambda m: m.set("segue_episodes_trained_total", 1), "is a counter, not a gauge"),
        (lambda m: m.add("segue_episodes_in_flight", env="a"), "is a gauge, not a counter"),
        (lambda m: m.observe("segue_episodes_in_flight", 1, env="a"), "is a gauge, not a histogram"),
        (lambda m: m.add("segue_episodes_admitted_total"), "needs the label 'env'"),
        (lambda m: m.add("segue_episodes_trained_total", env="a"), "has no label env"),
        (lambda m: m.add("segue_episodes_admitted_total", env="c"), "does not declare env='c'"),
        (lambda m: m.observe("segue_episode_duration_seconds", 1, env="c"), "does not declare env='c'"),
        (lambda m: m.add("segue_episodes_dropped_total", reason="stale", stage="nowhere"), "does not declare stage='nowhere'"),
        (lambda m: m.set("segue_queue_depth", 1, queue="prefetch"), "does not declare queue='prefetch'"),
        (lambda m: m.value("segue_nonsense"), "does not export it"),
        (lambda m: m.value("segue_episodes_admitted_total", env="c"), "does not declare env='c'"),
    ],
)
def test_what_the_catalogue_does_not_declare_is_refused(call: Callable[[Metrics], object], sentence: str) -> None:
    with pytest.raises(UndeclaredMetric, match=sentence):
        call(scheduler())


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_counter_only_grows(value: float) -> None:
    metrics = scheduler()
    with pytest.raises(ValueError, match="cannot grow"):
        metrics.add("segue_episodes_trained_total", value)
    assert metrics.value("segue_episodes_trained_total") == 0


@pytest.mark.parametrize(("values", "counts"), [([math.nan], [1]), ([math.inf], [1]), ([1.0], [-1]), ([1.0, 2.0], [1])])
def test_a_histogram_refuses_what_is_no_observation_and_keeps_nothing_of_it(values: list[float], counts: list[int]) -> None:
    metrics = Metrics("learner", envs=("a",))
    with pytest.raises(ValueError, match=AGE):
        metrics.observe_counts(AGE, values, counts)
    assert metrics.value(AGE) == 0


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(-10, 100), st.integers(0, 50)), max_size=30))
def test_observing_n_at_once_equals_observing_one_n_times(pairs: list[tuple[float, int]]) -> None:
    one, many = Metrics("learner"), Metrics("learner")
    many.observe_counts(AGE, [v for v, _ in pairs], [n for _, n in pairs])
    for value, count in pairs:
        for _ in range(count):
            one.observe(AGE, value)
    left, right = one.snapshot(), many.snapshot()
    apart = ("_sum", "segue_metric_writes_total")  # rounding; and n at once are fewer writes
    rest = [{k: v for k, v in side.items() if not any(word in k for word in apart)} for side in (left, right)]
    assert rest[0] == rest[1]
    assert left[f"{AGE}_count"] == sum(n for _, n in pairs)
    assert left[f"{AGE}_sum"] == pytest.approx(right[f"{AGE}_sum"])


def test_a_value_on_an_edge_falls_into_the_bucket_below_it() -> None:
    metrics = Metrics("learner", staleness_bound=4)
    metrics.observe_counts(AGE, [0, 4, 5], [3, 2, 1])
    samples = metrics.snapshot()
    buckets = [samples[f'{AGE}_bucket{{le="{edge}"}}'] for edge in ("0.0", "3.2", "4.0", "5.0", "+Inf")]
    assert buckets == [3, 3, 5, 6, 6]


def test_the_scrape_shows_the_histogram_as_prometheus_wants_it() -> None:
    metrics = Metrics("learner", staleness_bound=4)
    metrics.observe_counts(AGE, [0, 2], [10, 5])
    text = generate_latest(metrics.registry).decode()
    family = next(f for f in text_string_to_metric_families(text) if f.name == AGE)
    values = {(s.name, s.labels.get("le", "")): s.value for s in family.samples}
    assert values[(f"{AGE}_bucket", "0.0")] == 10 and values[(f"{AGE}_bucket", "2.0")] == 15
    assert values[(f"{AGE}_bucket", "+Inf")] == values[(f"{AGE}_count", "")] == 15
    assert values[(f"{AGE}_sum", "")] == 10


def test_a_snapshot_of_a_few_metrics_is_that_part_of_the_whole_one_and_asks_no_reader() -> None:
    metrics = Metrics("rollout", envs=("e",))
    metrics.add("segue_prefill_tokens_total", 3, cause="turn")
    metrics.observe("segue_turn_generate_seconds", 0.2)
    whole = metrics.snapshot()

    def never() -> list[Reading]:
        raise AssertionError("a reader was asked")

    metrics.attach_reader(never)
    names = ["segue_prefill_tokens_total", "segue_turn_generate_seconds", "segue_learner_steps_total"]
    part = metrics.snapshot(names)
    assert {read_sample(sample)[0] for sample in part} == {names[0], *(f"{names[1]}_{end}" for end in ("bucket", "count", "sum"))}
    assert part == {sample: whole[sample] for sample in part}


def test_build_info_says_what_runs() -> None:
    samples = Metrics("envpool", build=BuildInfo("1.2", "abc", 3)).snapshot()
    assert samples['segue_build_info{version="1.2",git_sha="abc",attempt="3"}'] == 1.0


def test_an_attached_clock_becomes_state_seconds_and_a_one_hot() -> None:
    time = [100.0]
    metrics = Metrics("learner")
    clock = StateClock(STATES["learner"], lambda: time[0])
    metrics.attach(clock)
    time[0] += 2.0
    clock.enter("compute")
    time[0] += 3.0
    assert metrics.value("segue_worker_state_seconds_total", state="other") == 2.0
    assert metrics.value("segue_worker_state_seconds_total", state="compute") == 3.0
    assert metrics.value("segue_worker_state_seconds_total") == 5.0
    assert metrics.value("segue_worker_state", state="compute") == 1
    assert metrics.value("segue_worker_state") == 1
    samples = metrics.snapshot()
    assert samples['segue_worker_state_seconds_total{state="compute"}'] == 3.0


def test_elapsed_time_is_measured_beside_the_states_and_not_made_of_them() -> None:
    states, machine = [100.0], [7.0]
    metrics = Metrics("learner", monotonic=lambda: machine[0])
    clock = StateClock(STATES["learner"], lambda: states[0])
    states[0] += 50.0  # before it is attached: setting up
    metrics.attach(clock)
    states[0] += 3.0
    machine[0] += 4.0
    samples = metrics.snapshot()
    assert samples["segue_worker_elapsed_seconds_total"] == 4.0
    assert metrics.value("segue_worker_state_seconds_total") == 3.0, "a clock that loses time can be told"


def test_a_clock_that_is_started_anew_counts_from_nothing_although_it_was_scraped_before() -> None:
    """As a role does when its work begins: else what it had counted while it was set up would hide what it counts then."""
    time = [100.0]
    metrics = Metrics("learner", monotonic=lambda: time[0])
    clock = StateClock(STATES["learner"], lambda: time[0])
    metrics.attach(clock)
    time[0] += 20.0
    assert metrics.value("segue_worker_state_seconds_total", state="other") == 20.0
    metrics.attach(clock)
    time[0] += 5.0
    assert metrics.value("segue_worker_state_seconds_total") == metrics.value("segue_worker_elapsed_seconds_total") == 5.0


def test_scrapes_at_once_never_move_state_seconds_back() -> None:
    metrics = Metrics("learner")
    metrics.attach(StateClock(STATES["learner"], itertools.count().__next__))  # every reading is a second later
    seen: list[list[float]] = [[] for _ in range(4)]

    def scrape(into: list[float]) -> None:
        for _ in range(300):
            metrics.snapshot()
            into.append(metrics._values["segue_worker_state_seconds_total"][("other",)])

    threads = [threading.Thread(target=scrape, args=(into,)) for into in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(values == sorted(values) for values in seen)


def test_a_clock_with_other_states_than_the_roles_is_refused() -> None:
    with pytest.raises(UndeclaredMetric, match="whose states are"):
        Metrics("learner").attach(StateClock(("dancing", "other"), lambda: 0.0))


def test_threads_lose_no_count() -> None:
    metrics = scheduler()

    def count() -> None:
        for _ in range(2000):
            metrics.add("segue_episodes_trained_total")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.value("segue_episodes_trained_total") == 8000


def test_snapshots_are_plain_and_independent() -> None:
    metrics = Metrics("rollout", "3", envs=("a",))
    before = metrics.snapshot()
    metrics.add("segue_decode_tokens_total", 5)
    assert before["segue_decode_tokens_total"] == 0.0
    assert json.loads(json.dumps(before)) == before


@pytest.mark.parametrize("role", ROLES)
def test_a_snapshot_holds_the_samples_of_a_scrape(role: str) -> None:
    metrics = Metrics(role, envs=("a",))
    scraped = {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())
        for sample in family.samples
    }
    taken = {(name, tuple(sorted(labels.items()))) for name, labels in map(read_sample, metrics.snapshot())}
    assert taken == scraped


def test_every_value_written_is_counted_whatever_way_it_came() -> None:
    metrics = Metrics("learner", envs=("e",), staleness_bound=4)
    assert metrics.value("segue_metric_writes_total") == 0
    metrics.add("segue_learner_steps_total")
    metrics.counter("segue_trained_tokens_total").add(5)
    metrics.set("segue_reward_mean", 1.0, env="e")
    metrics.gauge("segue_grad_norm").set(2.0)
    metrics.observe("segue_learner_step_seconds", 0.1, phase="prepare")
    metrics.histogram("segue_learner_step_seconds", phase="prepare").observe(0.1)
    metrics.observe_counts(AGE, [0, 1, 2], [5, 5, 5])
    assert metrics.value("segue_metric_writes_total") == 9
    clock = StateClock(STATES["learner"], lambda: 0.0)
    metrics.attach(clock)
    with clock.in_state("compute"):
        clock.enter("compute")  # it is there
    assert metrics.value("segue_metric_writes_total") == 11
    metrics.attach(clock)
    assert metrics.value("segue_metric_writes_total") == 11, "starting it anew takes nothing back"


def test_what_is_read_at_a_scrape_has_no_series_before_a_reader_is_there() -> None:
    metrics = Metrics("learner")
    name, seconds = "segue_process_cpu_seconds_total", iter((2.0, 3.0, 2.5))
    assert name not in metrics.snapshot() and name not in generate_latest(metrics.registry).decode()
    metrics.attach_reader(lambda: [(name, {}, next(seconds))])
    assert [metrics.snapshot()[name] for _ in range(3)] == [2.0, 3.0, 3.0]  # a counter never falls


@pytest.mark.parametrize(
    "reading",
    [("segue_nothing", {}, 1.0), ("segue_grad_norm", {}, 1.0), ("segue_gpu_memory_used_bytes", {"UUID": "GPU-9"}, 1.0)],
)
def test_a_reader_brings_only_what_is_declared_as_read(reading: tuple[str, dict[str, str], float]) -> None:
    metrics = Metrics("learner", gpus=("GPU-1",))
    metrics.attach_reader(lambda: [reading])
    with pytest.raises(UndeclaredMetric):
        metrics.snapshot()
