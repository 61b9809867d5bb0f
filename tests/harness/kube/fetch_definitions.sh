#!/usr/bin/env bash
# Gets the CustomResourceDefinitions of KubeRay v1.7.0 that tests validate by, into a folder, unless
# they are there: tests/harness/kube/fetch_definitions.sh ../shared/kuberay-crds
set -euo pipefail
folder=$1
source=https://raw.githubusercontent.com/ray-project/kuberay/v1.7.0/ray-operator/config/crd/bases
while read -r sha256 name; do
    [ ! -e "$folder/$name" ] || continue
    mkdir -p "$folder"
    curl --fail --silent --show-error --location --retry 3 --output "$folder/$name.partial" "$source/$name"
    echo "$sha256  $folder/$name.partial" | sha256sum --check --quiet
    mv "$folder/$name.partial" "$folder/$name"
done <<'LIST'
c44704442eef0c6721ad40c1d66782c8bd3fdab9d3344306a5820910a679baa1 ray.io_rayclusters.yaml
01a5cf3b17c1769fda44af7e82debcd98722f0c27b9ab84d084681c6649121f5 ray.io_rayjobs.yaml
LIST
