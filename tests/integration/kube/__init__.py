"""A Kubernetes API server for tests, in process, and stand-ins for KubeRay and Kueue."""
