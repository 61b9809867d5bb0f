"""Tests of metrics, traces and logs of the service."""
