"""Unit tests of trainer.checkpoint."""
