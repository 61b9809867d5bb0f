"""Arithmetic of the 2D layout: T, L, M, placement. Loads no torch."""
