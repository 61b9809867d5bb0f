"""Unit tests of trainer.protocol."""
