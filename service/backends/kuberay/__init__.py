"""Attempts as RayJobs of KubeRay."""
