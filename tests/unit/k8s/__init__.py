"""The manifests in k8s/: they build, are valid, keep our policies and fit each other."""
