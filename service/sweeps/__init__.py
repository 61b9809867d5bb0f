"""Sweeps: suggestions, and the loop that carries them out."""
