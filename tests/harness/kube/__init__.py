"""A Kubernetes API server and a KubeRay operator in the process of the tests."""
