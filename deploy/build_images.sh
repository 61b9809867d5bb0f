#!/usr/bin/env bash
# Builds the images with whatever engine is here: `make images`.
#   IMAGES="service trainer-cpu"   of service, trainer-cpu, trainer-cuda, service-export
#   ENGINE=docker|podman|buildah   (default: the first of them that works)
#   REPOSITORY=registry.example/ads  registry and folder that names begin with; the default,
#                                  localhost/shardloom, is on no registry that others could own
#   TORCH_INDEX_URL, TORCH_SHA256, PYTHON_TAG, PYTHON_DIGEST   arguments of the Dockerfiles
#   PIP_CONF=FILE                  pip's settings for the build (an index of your own, say), as a
#                                  secret: neither it nor what it says gets into an image
#   BUILD_ARGS="..."               anything else for the engine
#   PYTHON=.venv/bin/python        one that has Shardloom's packages for development
set -euo pipefail
cd "$(dirname "$0")/.."
IMAGES=${IMAGES:-service trainer-cpu}
REPOSITORY=${REPOSITORY:-localhost/shardloom}
VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)

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
    echo "$REPOSITORY/$3 ($ENGINE)"
    # shellcheck disable=SC2086  # several words are meant
    DOCKER_BUILDKIT=1 "$ENGINE" build "${arguments[@]}" ${BUILD_ARGS:-} .
}

# Bills of materials, which the Dockerfiles copy.
"${PYTHON:-.venv/bin/python}" -m deploy.sbom

for image in $IMAGES; do
    case "$image" in
    service) build "$image" Dockerfile.service "service:$VERSION" ;;
    trainer-cpu) build "$image" Dockerfile.trainer "trainer:$VERSION-cpu" cpu ;;
    trainer-cuda) build "$image" Dockerfile.trainer "trainer:$VERSION" cuda ;;
    service-export) build "$image" Dockerfile.service-export "service:$VERSION-export" ;;
    *) echo "no image is called $image" >&2; exit 2 ;;
    esac
done
