"""Prometheus metrics, OpenTelemetry traces and logging of the service."""
