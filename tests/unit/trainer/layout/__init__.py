"""Unit tests of trainer.layout."""
