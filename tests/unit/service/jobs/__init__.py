"""Tests of what can be done with a job."""
