"""Tests of the KubeRay backend."""
