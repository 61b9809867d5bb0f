"""Tests of the pure rules of jobs."""
