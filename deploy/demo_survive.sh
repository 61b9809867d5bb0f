#!/usr/bin/env bash
# The demo behind `make demo-survive`: three hosts, one of which dies in the middle of a job.
#   DATA=DIR   a MovieLens csv folder; default: ../shared/data/ml-latest-small, else generated
#   WAIT=0     end everything when the job has ended, with the job's exit code
# The hosts are Ray nodes with loopback addresses of their own; `host kill` ends all that runs there.
source "$(dirname "$0")/demo_common.sh"
job=movielens-survive
lost=127.0.0.4

# Print what is new in the timeline of the job, until it has $2 lines of kind $1 or the job has ended.
# Without a service the script ends, also where a caller handles what comes back.
num_printed=0
wait_for() {
    local events
    while true; do
        events="$(FORCE_COLOR= "$shardloom" events "$job")" || exit
        tail -n "+$((num_printed + 1))" <<<"$events"
        num_printed="$(wc -l <<<"$events")"
        [ "$(grep -c "^[0-9:]*  $1 " <<<"$events")" -lt "$2" ] || return 0
        ! grep -q "^[0-9:]*  job_ended " <<<"$events" || return 1
        sleep 1
    done
}

# The job is over before its time: say how it ended.
ended_early() {
    "$shardloom" show "$job"
    exit 1
}

start_shardloom --hosts 3
prepare_ratings
await_shardloom

say "Submitting examples/$job.yaml: a copy of the tables on each of 3 hosts"
"$shardloom" submit "examples/$job.yaml" --set data.path="$prepared" \
    --set training.epochs="${EPOCHS:-12}"
wait_for group_joined 3 || ended_early
"$shardloom" show "$job"

say "Host $lost dies"
"$shardloom" host kill "$lost"
wait_for recovered 1 || ended_early
"$shardloom" show "$job"

say "The host comes back"
if "$shardloom" host add "$lost"; then
    wait_for group_joined 4 || say "The job was over before the host could help"
else
    say "The host could not come back: the job ends on the two others"
fi

code=0
"$shardloom" follow "$job" || code=$?
say "Result"
"$shardloom" show "$job"
[ "$code" != 0 ] || stay
exit "$code"
