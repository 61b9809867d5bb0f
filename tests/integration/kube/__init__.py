"""The KubeRay backend against an API server of the tests, or that of KUBECONFIG."""
