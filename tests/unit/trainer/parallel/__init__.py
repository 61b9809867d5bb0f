"""Unit tests of trainer.parallel."""
