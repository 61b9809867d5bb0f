#!/usr/bin/env bash
# Makes the namespace, at the Pod Security level `restricted`, and the Secrets that the chart refers
# to, each only if it is not there yet:
#   shardloom-database      url (and password, for postgresql.enabled)
#   shardloom-service       secret_key: signs tokens, encrypts the secrets of jobs
#   shardloom-ray-token     auth_token: of the Ray cluster
#   shardloom-redis         password
#   shardloom-first-key     key: the administrator's API key that the service begins with
#   shardloom-object-store  AWS_*, where AWS_ACCESS_KEY_ID is set in the environment
# DATABASE_URL=postgresql://USER:PASSWORD@HOST/DATABASE says which database; without it one is made up
# for the chart's own. Values never stand on a command line, where others could read them.
set -euo pipefail
umask 077
NAMESPACE=${NAMESPACE:-shardloom}
KUBECTL=${KUBECTL:-kubectl}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

random_text() { head -c 96 /dev/urandom | base64 | tr -d '=+/\n' | head -c "${1:-48}"; }

# make NAME: a Secret with a key for each file that lies in $folder/NAME.
make() {
    if "$KUBECTL" --namespace "$NAMESPACE" get secret "$1" >/dev/null 2>&1; then
        echo "$1 is there and stays as it is"
    else
        "$KUBECTL" --namespace "$NAMESPACE" create secret generic "$1" --from-file="$folder/$1"
    fi
}

if ! "$KUBECTL" get namespace "$NAMESPACE" >/dev/null 2>&1; then
    "$KUBECTL" create namespace "$NAMESPACE"
    "$KUBECTL" label namespace "$NAMESPACE" pod-security.kubernetes.io/enforce=restricted
fi
mkdir "$folder"/shardloom-{database,service,ray-token,redis,first-key,object-store}
if [ -n "${DATABASE_URL:-}" ]; then
    printf %s "$DATABASE_URL" >"$folder/shardloom-database/url"
else
    password=$(random_text)
    printf %s "$password" >"$folder/shardloom-database/password"
    printf %s "postgresql://shardloom:$password@postgresql/shardloom" \
        >"$folder/shardloom-database/url"
fi
random_text >"$folder/shardloom-service/secret_key"
random_text >"$folder/shardloom-ray-token/auth_token"
random_text >"$folder/shardloom-redis/password"
printf 'shl_%s_%s' "$(random_text 12 | tr '[:upper:]' '[:lower:]')" "$(random_text 43)" \
    >"$folder/shardloom-first-key/key"
for name in database service ray-token redis first-key; do
    make "shardloom-$name"
done
if [ -n "${AWS_ACCESS_KEY_ID:-}" ]; then
    for name in AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_ENDPOINT_URL AWS_REGION; do
        if [ -n "${!name:-}" ]; then
            printf %s "${!name}" >"$folder/shardloom-object-store/$name"
        fi
    done
    make shardloom-object-store
fi
