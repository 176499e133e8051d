"""search_qa: the oracle always wins, nothing else wins by accident, and no answer can be guessed or known by heart."""

from __future__ import annotations

import collections
import itertools
import random
import re
import tomllib
from pathlib import Path

import pytest

from envpool.environment import DataError, play
from envpool.suites import load_suite
from envpool.suites.search_qa import SearchQASuite, build
from envpool.suites.search_qa.environment import CHAIN
from envpool.suites.search_qa.tasks import pair_split
from envpool.suites.search_qa.teacher import good_probability
from segue.episode import Task
from segue.errors import UserError
from segue.ports.envpool import Observation, observation_digest

BLIND_LIMIT = 0.05
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_TOKEN = re.compile(r"<[^<>\s]+>|\d|[^\W\d_]+|[^\w\s]")


@pytest.fixture(scope="module")
def suite() -> SearchQASuite:
    return build({})


def test_oracle_scores_one_on_every_task_and_random_does_not(suite: SearchQASuite) -> None:
    rng = random.Random(0)
    words = suite.vocabulary()
    random_scores = []
    for split in ("train", "eval"):
        for task in suite.tasks(split, 400, 3):
            demo = play(suite.make(task, 0), task, suite.oracle(task))
            assert demo.reward == 1.0 and demo.success == 1.0 and len(demo.turns) == CHAIN

            def babble(_: Observation) -> str:
                return " ".join(rng.choices([*words, "1", "2"], k=6))

            random_scores.append(play(suite.make(task, 0), task, babble).success)
    assert sum(random_scores) / len(random_scores) < 0.01


@pytest.mark.parametrize("action", ["", "garbage", "<answer></answer>", "<answer> </answer>", "<answer>none</answer>", None])
def test_garbage_empty_and_none_score_zero_without_exceptions(suite: SearchQASuite, action: str) -> None:
    for task in suite.tasks("eval", 50, 0):
        environment = suite.make(task, 0)
        environment.reset(task, task.seed)
        result = environment.step(action)
        assert result.reward <= 0.0 and result.info["success"] == 0.0


@pytest.fixture(scope="module", params=["defaults", "quickstart", "smoke"])
def shipped(request: pytest.FixtureRequest) -> SearchQASuite:
    """The suite as it is by default, and as the configs that users start with have it."""
    if request.param == "defaults":
        return build({})
    task = tomllib.loads((CONFIGS / f"{request.param}.toml").read_text(encoding="utf-8"))["task"]
    assert task["env"] == "search_qa"
    return build(task["args"])


def held_out(suite: SearchQASuite) -> list[Task]:
    """5000 held-out tasks, or all there are."""
    pairs = itertools.combinations(suite.facts, 2)
    possible = sum(a.name != b.name and pair_split(a, b) == "eval" for a, b in pairs) * len(suite.args.operations)
    return suite.tasks("eval", min(5000, possible), 0)


def test_best_blind_guess_stays_under_the_limit(shipped: SearchQASuite) -> None:
    """Whoever answers without tools can do no better than the most frequent answer, also per form of question."""
    tasks = held_out(shipped)
    assert len(tasks) >= 256, "enough to tell"
    overall = collections.Counter(task.payload["answer"] for task in tasks)
    assert overall.most_common(1)[0][1] / len(tasks) <= BLIND_LIMIT
    forms: dict[tuple[str, ...], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for task in tasks:
        attributes = [query.rsplit(" ", 1)[1] for query in task.payload["queries"]]
        forms[(task.payload["operation"], *attributes)][task.payload["answer"]] += 1
    guessed = sum(counter.most_common(1)[0][1] for counter in forms.values())
    assert guessed / len(tasks) <= BLIND_LIMIT


def test_knowing_one_of_the_two_facts_by_heart_is_not_enough(suite: SearchQASuite) -> None:
    for attribute in {fact.attribute for fact in suite.facts}:
        values = collections.Counter(fact.value for fact in suite.facts if fact.attribute == attribute)
        assert values.most_common(1)[0][1] / values.total() <= BLIND_LIMIT


def test_nor_is_it_on_average_over_the_facts_of_a_shipped_config(shipped: SearchQASuite) -> None:
    """With 40 facts an attribute of its own is above the limit as soon as two values are equal."""
    values: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for fact in shipped.facts:
        values[fact.attribute][fact.value] += 1
    guessed = sum(counter.most_common(1)[0][1] for counter in values.values())
    assert guessed / len(shipped.facts) <= BLIND_LIMIT


def test_there_are_tens_of_thousands_of_questions_and_the_splits_share_no_pair(suite: SearchQASuite) -> None:
    pairs: dict[str, set[frozenset[str]]] = {}
    for split, n in (("train", 20000), ("eval", 5000)):
        tasks = suite.tasks(split, n, 1) + suite.tasks(split, n, 2)  # type: ignore[arg-type]
        assert len({task.id for task in tasks[:n]}) == n
        pairs[split] = {frozenset(task.payload["queries"]) for task in tasks}
    assert not pairs["train"] & pairs["eval"]
    assert suite.tasks("train", 50, 1) == build({}).tasks("train", 50, 1)
    assert suite.tasks("train", 50, 1) != suite.tasks("train", 50, 2)
    assert suite.tasks("train", 50, 1) == suite.tasks("train", 100, 1)[:50]


def test_pair_split_does_not_depend_on_the_order(suite: SearchQASuite) -> None:
    rng = random.Random(0)
    for _ in range(200):
        first, second = rng.choice(suite.facts), rng.choice(suite.facts)
        assert pair_split(first, second) == pair_split(second, first)


def test_all_tasks_of_a_small_corpus_can_be_had_and_one_more_is_refused() -> None:
    suite = build({"facts": ["elements"], "digits": 2})
    possible = sum(
        1 for i, a in enumerate(suite.facts) for b in suite.facts[i + 1 :] if a.name != b.name and pair_split(a, b) == "eval"
    ) * len(suite.args.operations)
    assert len({task.id for task in suite.tasks("eval", possible, 0)}) == possible
    with pytest.raises(UserError, match="ask for fewer"):
        suite.tasks("eval", possible + 1, 0)
    with pytest.raises(UserError, match=f"has {possible} eval tasks"):
        suite.tasks("eval", 10**12, 0)  # is not searched for


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("iron number", "no action"),
        ("<search>iron", "tag not closed"),
        ("<search>iron<search>gold", "tag not closed"),
        ("<search></search>", "empty action"),
        ("<search>iron</calc>", "tags do not match"),
        ("<answer>1</answer><answer>2</answer>", "more than one action"),
        ("<search>iron</search><answer>2</answer>", "more than one action"),
        ("<search><answer>5</answer></search>", "more than one action"),
    ],
)
def test_malformed_actions_come_back_as_observations(suite: SearchQASuite, action: str, said: str) -> None:
    """F68, F82: no tool runs; the observation says what was wrong and which forms are valid."""
    task = suite.tasks("train", 1, 0)[0]
    environment = suite.make(task, 0)
    environment.reset(task, task.seed)
    result = environment.step(action)
    content = result.observation.messages[-1].content
    assert said in content and "<answer>number</answer>" in content
    assert not result.terminated and result.info["malformed"] == 1.0 and result.info["used_search"] == 0.0


def test_two_answers_never_win(suite: SearchQASuite) -> None:
    task = suite.tasks("train", 1, 0)[0]
    truth = task.payload["answer"]
    for action in (
        f"<answer>{truth}</answer><answer>0</answer>",
        f"<answer>{truth} 0</answer>",
        f"<answer>{truth}, 0</answer>",
        f"<answer>it is {truth}</answer>",
        f"<answer>1{truth}</answer>",
        f"{truth}",
    ):
        environment = suite.make(task, 0)
        environment.reset(task, task.seed)
        assert environment.step(action).info["success"] == 0.0, action


def test_answer_is_read_from_the_action_only(suite: SearchQASuite) -> None:
    """The observation shows the sum, and a search shows answer tags; neither counts as answering."""
    task = suite.tasks("train", 1, 0)[0]
    environment = suite.make(task, 0)
    environment.reset(task, task.seed)
    result = environment.step(f"<calc>{task.payload['answer']}</calc>")
    assert task.payload["answer"] in result.observation.messages[-1].content
    assert not result.terminated and result.info["success"] == 0.0


def test_digits_written_apart_are_one_number(suite: SearchQASuite) -> None:
    task = suite.tasks("train", 1, 0)[0]
    truth = " ".join(task.payload["answer"])
    environment = suite.make(task, 0)
    environment.reset(task, task.seed)
    assert environment.step(f"<answer> {truth} </answer>").reward == 1.0


def test_penalties_stay_well_below_success_and_quitting_does_not_beat_trying(suite: SearchQASuite) -> None:
    task = suite.tasks("train", 1, 0)[0]
    worst = play(suite.make(task, 0), task, lambda _: "")
    assert -0.25 < worst.reward < 0.0
    quits = play(suite.make(task, 0), task, lambda _: "<answer>0</answer>")
    actions = iter(["<search>iron number</search>", "<calc>1+1</calc>", "<answer>0</answer>"])
    tries = play(suite.make(task, 0), task, lambda _: next(actions))
    assert quits.reward <= tries.reward


def test_the_last_allowed_step_terminates_or_truncates_never_both(suite: SearchQASuite) -> None:
    task = suite.tasks("train", 1, 0)[0]
    for last, terminated in (("<answer>0</answer>", True), ("<calc>1+1</calc>", False)):
        actions = iter(["<calc>1+1</calc>"] * (suite.args.max_steps - 1) + [last])
        end = play(suite.make(task, 0), task, lambda _, actions=actions: next(actions)).turns  # type: ignore[misc]
        assert len(end) == suite.args.max_steps
        assert (end[-1].result.terminated, end[-1].result.truncated) == (terminated, not terminated)


def test_an_ended_episode_keeps_its_last_observation_and_takes_no_step(suite: SearchQASuite) -> None:
    """F77: nothing resets by itself."""
    task = suite.tasks("train", 1, 0)[0]
    environment = suite.make(task, 0)
    environment.reset(task, task.seed)
    assert "wrong" in environment.step("<answer>0</answer>").observation.messages[-1].content
    with pytest.raises(RuntimeError):
        environment.step("<answer>0</answer>")


def test_a_task_without_answer_is_a_data_error(suite: SearchQASuite) -> None:
    for payload in ({"question": "x"}, {"question": "x", "answer": ""}, {"question": "x", "answer": 3}):
        task = Task(id="broken", env="search_qa", seed=0, payload=payload)
        environment = suite.make(task, 0)
        environment.reset(task, 0)
        with pytest.raises(DataError):
            environment.step("<answer>3</answer>")


def test_first_observation_does_not_depend_on_member_or_other_instances(suite: SearchQASuite) -> None:
    """F75."""
    tasks = suite.tasks("train", 20, 0)
    hashes = []
    for task in tasks:
        hashes.append(observation_digest(suite.make(task, 0).reset(task, task.seed)))
        other = suite.make(tasks[0], 0)
        other.reset(tasks[0], 0)
        other.step("<calc>1+1</calc>")
        assert {observation_digest(suite.make(task, member).reset(task, task.seed)) for member in range(3)} == {hashes[-1]}
    assert len(set(hashes)) == len(tasks)


def test_everything_written_and_read_is_short_and_in_the_vocabulary(suite: SearchQASuite) -> None:
    words = set(suite.vocabulary())
    assert not any(char.isdigit() for word in words for char in word)
    rng = random.Random(1)
    longest_action = longest_observation = 0
    for task in suite.tasks("train", 300, 0):
        demo = suite.demonstrate(task, rng, 0.4)
        texts = [demo.prompt.messages[-1].content]
        for turn in demo.turns:
            texts += [turn.action, turn.result.observation.messages[-1].content]
            longest_action = max(longest_action, len(_TOKEN.findall(turn.action)))
            longest_observation = max(longest_observation, len(_TOKEN.findall(texts[-1])))
        for action in (
            "",
            "<calc>",
            "</calc><calc>",
            "<calc></calc>",
            "<calc>1/0</calc>",
            "<calc>x</calc>",
            "<search>zz</search>",
        ):
            environment = suite.make(task, 0)
            environment.reset(task, task.seed)
            texts.append(environment.step(action).observation.messages[-1].content)
            longest_observation = max(longest_observation, len(_TOKEN.findall(texts[-1])))
        for text in texts:
            assert all(token.isdigit() or token in words for token in _TOKEN.findall(text)), text
    assert longest_action <= 9 and longest_observation <= 20


def test_names_of_several_words_are_whole_in_the_vocabulary(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "facts.jsonl"
    path.write_text(
        "\n".join(
            f'{{"name": "New Town {c}", "attribute": "height", "value": {20 + i}}}'
            for i, c in enumerate("abcdefghijklmnopqrstuvwxyz")
        )
    )
    suite = build({"facts": [str(path)]})
    assert "new town a" in suite.vocabulary()
    task = suite.tasks("train", 1, 0)[0]
    assert play(suite.make(task, 0), task, suite.oracle(task)).reward == 1.0


def test_teacher_is_of_the_asked_quality(suite: SearchQASuite) -> None:
    rng = random.Random(0)
    tasks = suite.tasks("train", 4000, 0)
    for share in (0.0, 0.4, 1.0):
        done = [suite.demonstrate(task, rng, share).success for task in tasks]
        assert abs(sum(done) / len(done) - share) < 0.03
    demos = [suite.demonstrate(task, rng, 0.4) for task in tasks[:500]]
    assert {len(demo.turns) for demo in demos} == {1, 2, 4}
    assert any(len(demo.turns) == CHAIN and not demo.success for demo in demos)
    for operations in (["plus"], ["plus", "minus"], ["plus", "minus", "times"]):
        for share in (0.0, 0.3, 0.7, 1.0):
            chances = [good_probability(operation, operations, share) for operation in operations]
            assert sum(chances) / len(chances) == pytest.approx(share) and all(0 <= chance <= 1 for chance in chances)


def test_registry_and_arguments_answer_with_one_sentence() -> None:
    for name, args, part in (
        ("serch_qa", {}, "did you mean 'search_qa'"),
        ("nothing", {}, "use one of"),
        ("search_qa", {"topp": 1}, "did you mean task.args.top"),
        ("search_qa", {"zzz": 1}, "remove it"),
        ("search_qa", {"top": 4}, "task.args.top = 4"),
        ("search_qa", {"top": "x"}, "task.args.top = 'x'"),
        ("search_qa", {"facts": []}, "task.args.facts = []"),
        ("search_qa", {"facts": ["elments"]}, "no known source"),
        ("search_qa", {"facts": ["nowhere.jsonl"]}, "no such file"),
        ("search_qa", {"operations": ["add"]}, "plus, minus, times"),
    ):
        with pytest.raises(UserError, match=re.escape(part)) as caught:
            load_suite(name, args)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "line 21 is not valid JSON"),
        ("[1]", "line 21 is not a fact"),
        ('{"name": "x", "attribute": "y"}', "value"),
        ('{"name": "x", "attribute": "y", "value": "3"}', "line 21 is not a fact"),
        ('{"name": " ", "attribute": "y", "value": 3}', "empty name"),
        ('{"name": "<b>", "attribute": "y", "value": 3}', "< or >"),
        ('{"name": "n1", "attribute": "height", "value": 77}', "a second time"),
    ],
)
def test_a_bad_facts_file_names_the_line(tmp_path, line: str, part: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "facts.jsonl"
    good = [f'{{"name": "n{i}", "attribute": "height", "value": {30 + i}}}' for i in range(20)]
    path.write_text("\n".join([*good, line]))
    with pytest.raises(UserError, match=re.escape(part)):
        build({"facts": [str(path)]})
    path.write_text("\n".join(good[:5]))
    with pytest.raises(UserError, match="5 usable facts"):
        build({"facts": [str(path)]})
