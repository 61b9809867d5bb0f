"""Tests that drive the service through a real browser."""
