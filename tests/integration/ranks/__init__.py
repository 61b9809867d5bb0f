"""Tests on gloo ranks: what a world of processes computes, saves and tells."""
