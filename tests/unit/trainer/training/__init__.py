"""Unit tests of trainer.training."""
