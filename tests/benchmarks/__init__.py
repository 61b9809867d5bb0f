"""Benchmarks: run as python -m tests.benchmarks.NAME --json FILE."""
