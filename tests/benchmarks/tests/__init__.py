"""Tests of the benchmarks: what makes their ratios, and that both sides do the same."""
