#!/usr/bin/env bash
# Installs Shardloom into .venv, from pyproject.toml; `make setup` and `make setup-dev` call it.
#   deploy/install.sh run cpu|gpu    what a service and its jobs need, the demos among them
#   deploy/install.sh dev cpu|gpu    beside it what tests, lint and the docs need
#   PYTHON=...                       what .venv is made with (python3)
# uv installs several times as fast as pip, which does it where uv cannot be had.
set -euo pipefail
cd "$(dirname "$0")/.."
what=$1 stack=$2
python=.venv/bin/python
SECONDS=0

# By `pip`, and not `uv`: a machine may keep torch's CPU build in a place that only pip is told of.
# Nothing is compiled here: what is imported compiles once, by the last phase.
pip_install() {
    "$python" -m pip install --disable-pip-version-check --no-compile --progress-bar on "$@" |
        { grep -v 'already satisfied' || true; }
}

install() {
    if [ -x .venv/bin/uv ] && [ -t 2 ]; then
        .venv/bin/uv pip install --python "$python" "$@"
    elif [ -x .venv/bin/uv ]; then
        .venv/bin/uv pip install --python "$python" "$@" 2>&1 | { grep -v '^ [+~-] ' || true; }
    else
        pip_install "$@"
    fi
}

phase() { printf '\033[1m[%s] %s\033[0m (after %d s)\n' "$1" "$2" "$SECONDS"; }

if [ "$what" = dev ]; then
    echo "What tests, lint and docs need, into .venv: about one minute, two on a slow machine."
    phase 1/1 "Packages of developers"
    install -e ".[service,trainer-$stack,dev]"
else
    echo "Shardloom set-up ($stack stack) into .venv, once: one to three minutes on two cores," \
        "longer where the network is slow."
    phase 1/4 "Python environment"
    # Packages of both stacks have the same files.
    case $stack in cpu) other=gpu ;; *) other=cpu ;; esac
    if [ -e ".venv/.installed-$other" ]; then
        echo ".venv has the $other stack: go on with it by STACK=$other, or remove .venv first" >&2
        exit 1
    fi
    [ -x "$python" ] || "${PYTHON:-python3}" -m venv .venv
    pip_install uv || echo "uv cannot be had here: pip does it, and takes some minutes more"
    phase 2/4 "PyTorch, the largest part"
    pip_install --no-deps torch==2.13.0
    phase 3/4 "Ray, TorchRec, Shardloom and what they need"
    install -e ".[service,trainer-$stack]"
    # Its metadata asks for the CUDA build of fbgemm, where the CPU one is wanted.
    [ "$stack" != cpu ] || install --no-deps torchrec==1.8.0
    phase 4/4 "First import, which compiles what jobs use"
    "$python" -c "import trainer.training.worker" &
    "$python" -c "import ray.train.v2.api.data_parallel_trainer, trainer.driver, service.app, service.cli"
    wait $!
fi
"$python" -m trainer.protocol.versions
echo "Installed in $SECONDS s."
