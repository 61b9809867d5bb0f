#!/usr/bin/env bash
# The demo behind `make demo`: prepare MovieLens, start Shardloom, train, show where to look.
#   DATA=DIR   a MovieLens csv folder; default: ../shared/data/ml-latest-small, else generated
#   WAIT=0     end everything when the job has ended, with the job's exit code
set -euo pipefail
cd "$(dirname "$0")/.."
export SHARDLOOM_HOME="${SHARDLOOM_HOME:-$PWD/.shardloom}"
shardloom=.venv/bin/shardloom
prepared="$SHARDLOOM_HOME/demo/prepared"
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

source="${DATA:-}"
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

say "Starting Shardloom and a local Ray"
owned=no
"$shardloom" status >/dev/null 2>&1 || owned=yes
stop() { [ "$owned" = no ] || "$shardloom" down; }
trap stop EXIT
"$shardloom" up --detach

say "Submitting deploy/examples/movielens.yaml: 4 workers as 2 replicas of 2 shards"
code=0
"$shardloom" run deploy/examples/movielens.yaml --set data.path="$prepared" || code=$?
say "Result"
"$shardloom" show movielens
"$shardloom" checkpoints movielens

if [ "${WAIT:-1}" != 0 ] && [ "$code" = 0 ]; then
    say "The dashboard stays up; Ctrl-C ends it"
    "$shardloom" status
    trap 'exit 0' INT TERM
    while sleep 3600; do :; done
fi
exit "$code"
