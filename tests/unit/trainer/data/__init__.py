"""Unit tests of trainer.data."""
