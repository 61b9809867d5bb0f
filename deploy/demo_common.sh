#!/usr/bin/env bash
# What both demos share: where Shardloom keeps its files, and prepared ratings in $prepared.
#   DATA=DIR   a MovieLens csv folder; default: ../shared/data/ml-latest-small, else generated
set -euo pipefail
# A log here holds the link that opens the dashboard.
umask 077
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SHARDLOOM_HOME="${SHARDLOOM_HOME:-$PWD/.shardloom}"
shardloom=.venv/bin/shardloom
prepared="$SHARDLOOM_HOME/demo/prepared"
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

prepare_ratings() {
    local source="${DATA:-}"
    if [ -z "$source" ] && [ -d ../shared/data/ml-latest-small ]; then
        source=../shared/data/ml-latest-small
    fi
    if [ -z "$source" ]; then
        source="$SHARDLOOM_HOME/demo/generated"
        if [ ! -f "$source/ratings.csv" ]; then
            say "No MovieLens folder given: generating 100 000 ratings"
            "$shardloom" data generate movielens "$source" --ratings 100000
        fi
    fi
    say "Preparing ratings from $source"
    "$shardloom" data prepare movielens "$source" "$prepared" --split per_user --overwrite
}

# Begins to start Shardloom with the given options unless it runs; ends it with the script if it was
# started. What is done before `await_shardloom` is done meanwhile.
start_shardloom() {
    say "Starting Shardloom and a local Ray, in the background"
    mkdir -p "$SHARDLOOM_HOME/demo"
    start_log="$SHARDLOOM_HOME/demo/start.log"
    "$shardloom" up --detach "$@" >"$start_log" 2>&1 &
    start_pid=$!
    trap stop_shardloom EXIT
}
await_shardloom() {
    say "Waiting until Shardloom and Ray are up"
    local code=0
    wait "$start_pid" || code=$?
    cat "$start_log"
    return "$code"
}
stop_shardloom() {
    wait "$start_pid" || true
    grep -q 'is already up' "$start_log" || "$shardloom" down
}

# Leaves the dashboard up until Ctrl-C, unless WAIT=0.
stay() {
    [ "${WAIT:-1}" != 0 ] || return 0
    say "The dashboard stays up; Ctrl-C ends it"
    "$shardloom" status
    trap 'exit 0' INT TERM
    while sleep 3600; do :; done
}
