"""Unit tests of trainer.coordination."""
