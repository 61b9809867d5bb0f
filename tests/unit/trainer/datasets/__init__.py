"""Unit tests of trainer.datasets."""
