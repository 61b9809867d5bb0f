#!/usr/bin/env bash
# Makes the Secrets that the manifests refer to, each only if it is not there yet:
#   shardloom-database      url (and password, for the overlay dev)
#   shardloom-service       secret_key: signs tokens, encrypts the secrets of jobs
#   shardloom-ray-token     auth_token: of the Ray cluster
#   shardloom-object-store  AWS_*, where AWS_ACCESS_KEY_ID is set in the environment
# DATABASE_URL=postgresql://USER:PASSWORD@HOST/DATABASE says which database; without it one is
# made up for the overlay dev. Values never stand on a command line, where others could read them.
set -euo pipefail
umask 077
NAMESPACE=shardloom
KUBECTL=${KUBECTL:-kubectl}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

random_text() { head -c 48 /dev/urandom | base64 | tr -d '=+/\n'; }

# make NAME: a Secret with a key for each file that lies in $folder/NAME.
make() {
    if "$KUBECTL" --namespace "$NAMESPACE" get secret "$1" >/dev/null 2>&1; then
        echo "$1 is there and stays as it is"
    else
        "$KUBECTL" --namespace "$NAMESPACE" create secret generic "$1" --from-file="$folder/$1"
    fi
}

"$KUBECTL" get namespace "$NAMESPACE" >/dev/null 2>&1 || "$KUBECTL" create namespace "$NAMESPACE"
mkdir "$folder"/shardloom-{database,service,ray-token,object-store}
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
make shardloom-database
make shardloom-service
make shardloom-ray-token
if [ -n "${AWS_ACCESS_KEY_ID:-}" ]; then
    for name in AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_ENDPOINT_URL AWS_REGION; do
        if [ -n "${!name:-}" ]; then
            printf %s "${!name}" >"$folder/shardloom-object-store/$name"
        fi
    done
    make shardloom-object-store
fi
