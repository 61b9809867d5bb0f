"""Tests of the benchmarks: both sides do the same, and the paper is predicted."""
