"""Whatever is wrong with a config is one sentence that names the key, the value and the remedy; what is right survives TOML."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.config import Config, load_config, parse_overrides, to_toml
from segue.config.docs import document, keys, sections
from segue.config.root import resolve
from segue.errors import UserError

BASE: dict[str, Any] = {"steps": 10, "task": {"env": "latency"}, "warmstart": {}}


def config(*overrides: str) -> Config:
    data = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    for item in overrides:
        path, _, text = item.partition("=")
        *parents, last = path.split(".")
        node = data
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = parse_overrides([f"x={text}"])["x"]
    return resolve(data, "demo.toml")


def sentence(*overrides: str) -> str:
    with pytest.raises(UserError) as refused:
        config(*overrides)
    text = str(refused.value)
    assert text.startswith("demo.toml ") and text.endswith((".", "?")) and not text.endswith("?.") and "\n" not in text, text
    return text


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["learner.lrr=1e-5"], ["learner.lrr = 1e-05", "did you mean learner.lr?"]),
        (["lerner.lr=1e-5"], ["unknown table lerner", "did you mean learner?"]),
        (["qqqq=1"], ["unknown key qqqq = 1", "remove it"]),
        (["learner.zzzzz=1"], ["learner.zzzzz = 1", "remove it"]),
        (["warmstart.layer=2"], ["warmstart.layer = 2", "did you mean warmstart.layers?"]),
        (["staleness.max_age=-1"], ["staleness.max_age = -1", "greater than or equal to 0", "change it"]),
        (["steps=0"], ["steps = 0", "greater than or equal to 1", "change it"]),
        (["steps=many"], ["steps = 'many'", "must be a whole number", "change it"]),
        (['steps="6"'], ["steps = '6'", "must be a whole number", "change it"]),
        (["steps=6.0"], ["steps = 6.0", "must be a whole number", "change it"]),
        (["rollout.nodes=true"], ["rollout.nodes = true", "must be a whole number", "change it"]),
        (["learner.lr=true"], ["learner.lr = true", "must be a number", "change it"]),
        (["data.shuffle=1"], ["data.shuffle = 1", "must be true or false", "change it"]),
        (["cluster.interface=1"], ["cluster.interface = 1", "must be a text", "change it"]),
        (["cluster.ports=7"], ["cluster.ports = 7", "must be a list", "change it"]),
        (["data.prefetch=x"], ["data.prefetch = 'x'", "must be a whole number", "change it"]),
        (["task.args=3"], ["task.args = 3", "must be a table", "change it"]),
        (["learner=3"], ["learner = 3", "must be a table", "change it"]),
        (["learner.lr.x=1"], ["learner.lr", "must be a number", "change it"]),
        (["learner.lr=inf"], ["learner.lr = inf", "must be a finite number", "change it"]),
        (["learner.lr=nan"], ["learner.lr = nan", "must be a finite number", "change it"]),
        (["mode=fast"], ["mode = 'fast'", "'async', 'one_step_off' or 'sync'", "change it"]),
        (["cluster.ports=[20000, 10]"], ["cluster.ports = [20000, 10]", "[lo, hi] with 1024 <= lo <= hi <= 65535", "change it"]),
        (["cluster.ports=[80, 90]"], ["cluster.ports", "1024 <= lo"]),
        (["cluster.ports=[20000]"], ["gives cluster.ports too few values", "add the missing one"]),
        (["cluster.ports=[1, 2, 3]"], ["cluster.ports = [1, 2, 3]", "must have at most 2 values", "change it"]),
        (["learner.clip_low=1.0"], ["learner.clip_low = 1.0", "less than 1"]),
        (["learner.adam_betas=[1.5, 0.9]"], ["learner.adam_betas.0 = 1.5", "less than 1", "change it"]),
        (["seed=-1"], ["seed = -1", "greater than or equal to 0", "change it"]),
        (["warmstart.seed=9223372036854775808"], ["warmstart.seed = 9223372036854775808", "less than", "change it"]),
        (["rollout.temperature=1e-4"], ["rollout.temperature = 0.0001", "greater than or equal to 0.001"]),
        (["eval.temperature=1e-4"], ["eval.temperature = 0.0001", "use 0 (greedy) or at least 0.001"]),
        (["rollout.engine=vlm"], ["rollout.engine = 'vlm'", "embedded or vllm, or one of your own as module:name"]),
        (["rollout.engine_args.block_size=32"], ["rollout.engine_args", "'embedded'", "set rollout.engine = 'vllm'"]),
        (["rollout.engine=vllm", "rollout.idle_slots=4"], ["rollout.idle_slots = 4", "leave it out"]),
        (["rollout.engine=vllm", "rollout.temperature=0.005"], ["rollout.temperature = 0.005", "raise it"]),
        (["rollout.engine=vllm", "eval.temperature=0.005"], ["eval.temperature = 0.005", "use 0 or raise it"]),
        (
            ["update.inflight=turn", "update.drain_seconds=60"],
            ["update.drain_seconds = 60", "update.deadline_seconds = 60", "lower it"],
        ),
        (["group.size=1"], ["group.size = 1", "learner.advantage = 'grpo'", "set group.size to 2 or more"]),
        (["group.size=1", "learner.advantage=rloo"], ["group.size = 1", "'rloo'", "set group.size to 2 or more"]),
        (["weightsync.probe_tokens=1"], ["weightsync.probe_tokens = 1", "set it to 2 or more, or to 0"]),
        (["group.size=4", "group.min_valid=5"], ["group.min_valid = 5", "group.size = 4", "lower it"]),
        (
            ["group.size=4", "group.redundancy=5", "rollout.nodes=2", "rollout.max_episodes=4"],
            ["group.redundancy = 5", "rollout.max_episodes = 8", "9 of one group", "raise rollout.max_episodes"],
        ),
        (["queue.groups=79"], ["queue.groups = 79", "staleness.max_age = 4", "batch.groups = 16", "80", "raise queue.groups"]),
        (["staleness.max_age=0", "data.prefetch=1"], ["data.prefetch = 1", "staleness.max_age = 0", "set data.prefetch to 0"]),
        (["mode=sync", "data.prefetch=1"], ["data.prefetch = 1", "leave it out"]),
        (["data.prefetch=5"], ["data.prefetch = 5", "staleness.max_age = 4", "lower it"]),
        (["mode=sync", "update.rolling=0.5"], ["update.rolling = 0.5", "mode = 'sync'", "leave it out"]),
        (["learner.aggregation=constant"], ["learner.aggregation = 'constant'", "learner.constant_length", "set it"]),
        (["learner.mask_range=[2.0, 1.0]"], ["learner.mask_range = [2, 1]", "must hold 1"]),
        (["learner.proximal=loglinear"], ["learner.proximal = 'loglinear'", "learner.minibatches = 1", "leave it out"]),
        (["learner.minibatches=17"], ["learner.minibatches = 17", "batch.groups = 16", "lower it"]),
        (["rollout.max_turn_tokens=512"], ["rollout.max_turn_tokens = 512", "rollout.max_tokens = 512", "lower it"]),
        (
            ["rollout.max_episodes=65"],
            ["65 episodes", "1 × 4 × 32 = 128", "lower rollout.max_episodes or raise envpool.instances"],
        ),
        (
            ["rollout.max_nodes=3"],
            ["up to 3 nodes (rollout.max_nodes)", "1 × 4 × 32 = 128", "raise envpool.max_pools or envpool.instances"],
        ),
        (["model.path=/models/x"], ["both model.path and a [warmstart] table", "leave one out"]),
        (["warmstart.heads=5"], ["warmstart.hidden_size = 192", "warmstart.heads = 5", "change one"]),
        (
            ["weightsync.staging=none", "update.inflight=turn", "update.drain_seconds=40"],
            ["weightsync.staging = 'none'", "update.drain_seconds = 40", "weightsync.deadline_seconds = 30", "lower it"],
        ),
        (
            ["update.policy=budget", 'update.budget_inflight=["turn"]', "update.drain_seconds=60"],
            ["update.drain_seconds = 60", "update.deadline_seconds = 60", "lower it"],
        ),
        (
            ["weightsync.staging=none", "update.policy=budget", 'update.budget_inflight=["turn"]', "update.drain_seconds=40"],
            ["weightsync.staging = 'none'", "update.drain_seconds = 40", "lower it"],
        ),
        (
            ["weightsync.backend=nccl", "learner.gpus=1", "rollout.gpus=0.5"],
            ["weightsync.backend = 'nccl'", "rollout.gpus = 0.5", "use backend = 'gloo'"],
        ),
        (
            ["rollout.engine=vllm", "rollout.gpus=1", "rollout.engine_args.tensor_parallel_size=2"],
            ["rollout.gpus = 1", "each of 2 workers", "set rollout.gpus to 2"],
        ),
        (["weightsync.backend=nccl"], ["weightsync.backend = 'nccl'", "learner.gpus and rollout.gpus", "backend = 'gloo'"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) and "=" in value[0] else "",
)
def test_every_refusal_names_key_value_and_remedy(overrides: list[str], named: list[str]) -> None:
    text = sentence(*overrides)
    for words in named:
        assert words in text, text


def test_what_is_missing_is_named() -> None:
    for data, what in (({"task": {"env": "x"}, "warmstart": {}}, "key steps"), ({"steps": 1, "warmstart": {}}, "table [task]"),
                      ({"steps": 1, "task": {}, "warmstart": {}}, "key task.env")):  # fmt: skip
        with pytest.raises(UserError, match=rf"^demo.toml lacks the {re.escape(what)}: add it\.$"):
            resolve(data, "demo.toml")
    with pytest.raises(UserError, match=r"names no model: set model.path .* or add a \[warmstart\] table"):
        resolve({"steps": 1, "task": {"env": "x"}}, "demo.toml")


def test_files_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no config file .*: name one that exists"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(UserError, match=r"is a folder: name a config file in it"):
        load_config(tmp_path)
    for name, content in (("a", b"steps = \n"), ("b", b"\xff\xfe"), ("c", b"steps = 1\nsteps = 2\n"), ("d", b"[task\n")):
        path = tmp_path / f"{name}.toml"
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"is not valid TOML \(.*\): correct that line\."):
            load_config(path)
    with pytest.raises(UserError, match=r"cannot be read \(Not a directory\): check its permissions"):
        load_config(tmp_path / "a.toml" / "b.toml")


# --- overrides ------------------------------------------------------------------------------------------------------


def test_overrides_are_toml_or_else_strings() -> None:
    found = parse_overrides(["a=1", "b.c=1e-5", "b.d=true", "e=[1, 2]", "f=plain text", 'g="quoted"', "h.i.j=", "k=a=b"])
    assert found == {
        "a": 1, "b": {"c": 1e-5, "d": True}, "e": [1, 2], "f": "plain text", "g": "quoted", "h": {"i": {"j": ""}}, "k": "a=b",
    }  # fmt: skip


def test_a_later_override_wins_and_the_file_keeps_what_is_not_named(tmp_path: Path) -> None:
    path = tmp_path / "demo.toml"
    path.write_text('steps = 10\n[task]\nenv = "latency"\n[task.args]\nturns = 3\n[warmstart]\nlayers = 2\n')
    made = load_config(path, ["steps=2", "steps=3", "task.args.seed=4", "warmstart.heads=3"])
    assert made.steps == 3 and made.task.args == {"turns": 3, "seed": 4}
    assert made.warmstart is not None and (made.warmstart.layers, made.warmstart.heads) == (2, 3)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["nonsense"], "--set nonsense is not key=value"),
        (["=3"], "--set =3 is not key=value"),
        (["a=1", "a.b=2"], "--set a.b=2 goes into a, which another --set made a value"),
        (["a.b=2", "a=1"], "--set a=1 gives a a value, but another --set goes into it"),
    ],
)
def test_overrides_that_make_no_sense_are_one_sentence(items: list[str], words: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_overrides(items)
    assert str(refused.value).startswith(words) and str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["steps=foo"], "--set steps=foo sets steps = 'foo', which must be a whole number: change it."),
        (["steps=3", "steps=0"], "--set steps=0 sets steps = 0, which must be greater than or equal to 1: change it."),
        (["learner.lrr=1"], "--set learner.lrr=1 has an unknown key learner.lrr = 1: did you mean learner.lr?"),
        (["lerner.lr=1"], "--set lerner.lr=1 has an unknown table lerner: did you mean learner?"),
        (["cluster.ports=[9, true]"], "--set cluster.ports=[9, true] sets cluster.ports.1 = true, which must be a whole number"),
        (["seed=1", "group.size=1"], "{path} with --set group.size=1 sets group.size = 1 with learner.advantage = 'grpo', whose"),
        (["seed=1"], "{path} sets eval.temperature = 0.0001, too cold"),
    ],
)
def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file(tmp_path: Path, items: list[str], words: str) -> None:
    path = tmp_path / "demo.toml"
    path.write_text('steps = 10\n[task]\nenv = "latency"\n[warmstart]\n[eval]\ntemperature = 1e-4\n')
    with pytest.raises(UserError) as refused:
        load_config(path, items)
    assert str(refused.value).startswith(words.format(path=path)), refused.value


def test_a_model_named_on_the_command_line_wins_over_the_files_warm_start(tmp_path: Path) -> None:
    path = tmp_path / "demo.toml"
    path.write_text('steps = 10\n[task]\nenv = "latency"\n[warmstart]\n')
    made = load_config(path, ["model.path=/m"])
    assert made.model.path == "/m" and made.warmstart is None
    with pytest.raises(UserError, match=r"has both model\.path and a \[warmstart\]"):
        load_config(path, ["model.path=/m", "warmstart.steps=3"])


# --- what depends on other keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "age", "prefetch", "groups", "inflight"),
    [
        ([], 4, 1, 80, "recompute"),
        (["mode=sync"], 0, 0, 16, "recompute"),
        (["mode=sync", "staleness.max_age=3"], 0, 0, 16, "recompute"),
        (["mode=one_step_off"], 1, 1, 32, "episode"),
        (["staleness.max_age=0"], 0, 0, 16, "recompute"),
        (["staleness.max_age=2", "batch.groups=3", "queue.groups=20", "data.prefetch=2"], 2, 2, 20, "recompute"),
    ],
)
def test_defaults_that_depend_on_other_keys(overrides: list[str], age: int, prefetch: int, groups: int, inflight: str) -> None:
    made = config(*overrides)
    found = (made.staleness.max_age, made.data.prefetch, made.queue.groups, made.update.inflight)
    assert found == (age, prefetch, groups, inflight)


@pytest.mark.parametrize(
    ("overrides", "tokens", "tolerance"),
    [
        ([], 64, 1e-3),
        (["rollout.dtype=float16"], 64, 0.1),
        (["rollout.dtype=bfloat16"], 64, 1.0),
        (["learner.dtype=bfloat16", "rollout.dtype=float16"], 64, 1.0),
        (["rollout.dtype=bfloat16", "weightsync.probe_tolerance=0.25"], 64, 0.25),
        (["weightsync.probe_tokens=0"], 0, 1e-3),
        (["rollout.max_tokens=50", "rollout.max_turn_tokens=8", "weightsync.probe_tokens=100"], 50, 1e-3),
    ],
)
def test_the_probe_fits_a_slot_and_allows_for_the_coarser_precision(overrides: list[str], tokens: int, tolerance: float) -> None:
    made = config(*overrides)
    assert (made.weightsync.probe_tokens, made.weightsync.probe_tolerance) == (tokens, tolerance)


@pytest.mark.parametrize(
    ("size", "given", "needed"), [(1, 0, 1), (2, 0, 2), (3, 0, 2), (5, 0, 3), (8, 0, 4), (8, 1, 2), (8, 7, 7), (8, 8, 8)]
)
def test_a_group_ships_with_half_its_members_but_never_under_two(size: int, given: int, needed: int) -> None:
    group = ["learner.advantage=grpo"] if size > 1 else []
    try:
        made = config(f"group.size={size}", f"group.min_valid={given}", *group)
    except UserError:
        assert size == 1, "no estimator of today works with groups of one"
        return
    assert made.group.needed == made.group.min_valid == needed


@settings(max_examples=40)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "mode": st.sampled_from(["async", "one_step_off", "sync"]),
            "steps": st.integers(1, 10**6),
            "batch.groups": st.integers(1, 64),
            "group.size": st.integers(2, 32),
            "staleness.max_age": st.integers(0, 9),
            "learner.lr": st.floats(1e-9, 1.0),
            "task.args": st.dictionaries(
                st.text(max_size=4),
                st.integers() | st.text(max_size=4) | st.floats(allow_nan=False) | st.booleans() | st.dates(),
                max_size=3,
            ),
            "cluster.ports": st.tuples(st.integers(1024, 30000), st.integers(30001, 65535)).map(list),
            "learner.mask_outcomes": st.lists(st.sampled_from(["truncated_turns", "truncated_wall"]), unique=True),
        },
    )
)
def test_the_resolved_config_survives_toml_and_is_its_own_resolution(values: dict[str, Any]) -> None:
    data: dict[str, Any] = {"steps": 10, "task": {"env": "latency"}, "warmstart": {"layers": 2}}
    for path, value in values.items():
        *parents, last = path.split(".")
        node = data
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    made = resolve(data, "demo.toml")
    assert resolve(tomllib.loads(to_toml(made)), "config.toml") == made


def test_the_learner_waits_longer_for_a_batch_than_an_episode_may_take() -> None:
    assert config().learner.batch_wait_seconds == 600.0
    assert config("rollout.wall_seconds=3600").learner.batch_wait_seconds == 3900.0
    assert config("rollout.wall_seconds=3600", "learner.batch_wait_seconds=5").learner.batch_wait_seconds == 5.0


def test_a_config_is_frozen() -> None:
    made = config()
    with pytest.raises(Exception, match="frozen"):
        made.learner.lr = 1.0  # type: ignore[misc]


# --- documentation --------------------------------------------------------------------------------------------------


def test_every_key_and_every_table_is_documented() -> None:
    tables = dict(sections())
    assert set(tables) == {""} | {name for name in Config.model_fields if name not in ("mode", "steps", "seed")}
    for name, kind in tables.items():
        assert kind.__doc__ and (not name or kind.__doc__.startswith(f"`[{name}]`: ")), name
        for key, field in keys(kind):
            text = field.description or ""
            assert text.endswith("."), f"{name}.{key}: {text!r}"


def test_the_page_lists_every_key() -> None:
    page = document()
    for name, kind in sections():
        assert f"## `[{name}]`" in page or not name
        for key, _ in keys(kind):
            assert f"|`{key}`|" in page


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_the_configs_that_we_ship_load(path: Path) -> None:
    made = load_config(path)
    assert resolve(tomllib.loads(to_toml(made)), "config.toml") == made
    load_config(path, ["mode=sync"])
