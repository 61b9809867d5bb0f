"""Unit tests of trainer.export."""
