#!/usr/bin/env bash
# The demo behind `make demo`: prepare MovieLens, start Shardloom, train, show where to look.
#   DATA=DIR   a MovieLens csv folder; default: ../shared/data/ml-latest-small, else generated
#   WAIT=0     end everything when the job has ended, with the job's exit code
source "$(dirname "$0")/demo_common.sh"

start_shardloom
prepare_ratings
await_shardloom

say "Submitting examples/movielens.yaml: 4 workers as 2 replicas of 2 shards"
code=0
"$shardloom" run examples/movielens.yaml --set data.path="$prepared" || code=$?
say "Result"
"$shardloom" show movielens
"$shardloom" checkpoints movielens

[ "$code" != 0 ] || stay
exit "$code"
