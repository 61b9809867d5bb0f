"""Unit tests of trainer.models."""
