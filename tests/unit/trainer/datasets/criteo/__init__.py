"""Unit tests of trainer.datasets.criteo."""
