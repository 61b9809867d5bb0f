"""Unit tests of trainer.datasets.io."""
