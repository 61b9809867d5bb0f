"""Tests of the backends that run attempts."""
