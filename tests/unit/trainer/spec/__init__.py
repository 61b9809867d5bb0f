"""Unit tests of trainer.spec."""
