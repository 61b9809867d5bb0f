"""Criteo click logs: reader, encoding and a synthetic generator."""
