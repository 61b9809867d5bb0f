"""Tests that need CUDA GPUs; they are skipped, with the reason, where there is none."""
