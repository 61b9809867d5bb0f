#!/usr/bin/env bash
# Builds the images with whatever engine is here: `make images`.
#   IMAGES="service trainer-cpu"   of service, trainer-cpu, trainer-cuda, service-export
#   ENGINE=docker|podman|buildah   (default: the first of them that works)
#   REPOSITORY=registry.example/ads  registry and folder that names begin with; the default,
#                                  localhost/shardloom, is on no registry that others could own
#   TORCH_INDEX_URL, TORCH_SHA256, PYTHON_TAG, PYTHON_DIGEST   arguments of the Dockerfiles
#   PIP_CONF=FILE                  pip's settings for the build (an index of your own, say), as a
#                                  secret: neither it nor what it says gets into an image
#   PUSH=1                         push them too, with provenance and SBOM (SPDX) of what was built;
#                                  docker alone does that. REGISTRY_USER, REGISTRY_PASSWORD sign in.
#                                  DIST/IMAGE.json (dist) has the digest, IMAGE.spdx.json the SBOM
#   BUILD_ARGS="..."               anything else for the engine
#   PYTHON=python3                 reads what docker says of a push
set -euo pipefail
cd "$(dirname "$0")/.."
IMAGES=${IMAGES:-service trainer-cpu}
REPOSITORY=${REPOSITORY:-localhost/shardloom}
VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
PYTHON=${PYTHON:-python3}
DIST=${DIST:-dist}

works() {
    command -v "$1" >/dev/null || return 1
    [ "$1" != docker ] || docker info >/dev/null 2>&1
}

find_engine() {
    for each in docker podman buildah; do
        if works "$each"; then echo "$each"; return; fi
    done
    echo "no container engine: neither docker (with its daemon), podman nor buildah works here;" \
        "install one, or build elsewhere with the commands in docs/guides/images.md" >&2
    exit 1
}

ENGINE=${ENGINE:-$(find_engine)}
works "$ENGINE" || { echo "$ENGINE does not work here: see \`$ENGINE info\`" >&2; exit 1; }

# build IMAGE DOCKERFILE TAG [VARIANT]
build() {
    local arguments=(--file "deploy/$2" --tag "$REPOSITORY/$3")
    arguments+=(--build-arg "VERSION=$VERSION" --build-arg "REVISION=$REVISION")
    [ -z "${4:-}" ] || arguments+=(--build-arg "VARIANT=$4")
    [ "$1" != service-export ] ||
        arguments+=(--build-arg "TRAINER_IMAGE=$REPOSITORY/trainer:$VERSION-cpu")
    for name in TORCH_INDEX_URL TORCH_SHA256 PYTHON_TAG PYTHON_DIGEST; do
        case "$1-$name" in
        service-TORCH_* | service-export-*) ;;
        *) [ -z "${!name:-}" ] || arguments+=(--build-arg "$name=${!name}") ;;
        esac
    done
    [ -z "${PIP_CONF:-}" ] || arguments+=(--secret "id=pip,src=$PIP_CONF")
    # Podman's and buildah's own format drops health checks.
    [ "$ENGINE" = docker ] || arguments+=(--format docker --layers)
    local command=(build)
    if [ -n "${PUSH:-}" ]; then
        command=(buildx build --push --provenance mode=max --sbom true)
        command+=(--metadata-file "$DIST/$1.json")
    fi
    echo "$REPOSITORY/$3 ($ENGINE)"
    # shellcheck disable=SC2086  # several words are meant
    DOCKER_BUILDKIT=1 "$ENGINE" "${command[@]}" "${arguments[@]}" ${BUILD_ARGS:-} .
    [ -z "${PUSH:-}" ] || tell_pushed "$1" "$REPOSITORY/${3%:*}"
}

# tell_pushed IMAGE NAME: its digest, to GitHub's next steps too, and its SBOM.
tell_pushed() {
    local digest
    digest=$("$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))["containerimage.digest"])' "$DIST/$1.json")
    echo "pushed $2@$digest"
    printf 'name=%s\ndigest=%s\n' "$2" "$digest" >>"${GITHUB_OUTPUT:-/dev/null}"
    docker buildx imagetools inspect "$2@$digest" --format '{{ json .SBOM.SPDX }}' >"$DIST/$1.spdx.json"
}

prepare_push() {
    if [ "$ENGINE" != docker ]; then
        echo "PUSH=1 wants docker: $ENGINE attests neither provenance nor SBOM" >&2
        exit 1
    fi
    case "$REPOSITORY" in
    localhost/*) echo "PUSH=1: set REPOSITORY to a registry and folder of yours" >&2; exit 1 ;;
    esac
    mkdir -p "$DIST"
    [ -z "${REGISTRY_PASSWORD:-}" ] || printf %s "$REGISTRY_PASSWORD" |
        docker login --username "${REGISTRY_USER:-}" --password-stdin "${REPOSITORY%%/*}"
    # docker's own builder makes no attestations.
    docker buildx inspect shardloom >/dev/null 2>&1 ||
        docker buildx create --name shardloom --driver docker-container >/dev/null
    export BUILDX_BUILDER=shardloom
}

[ -z "${PUSH:-}" ] || prepare_push

for image in $IMAGES; do
    case "$image" in
    service) build "$image" Dockerfile.service "service:$VERSION" ;;
    trainer-cpu) build "$image" Dockerfile.trainer "trainer:$VERSION-cpu" cpu ;;
    trainer-cuda) build "$image" Dockerfile.trainer "trainer:$VERSION" cuda ;;
    service-export) build "$image" Dockerfile.service-export "service:$VERSION-export" ;;
    *) echo "no image is called $image" >&2; exit 2 ;;
    esac
done
