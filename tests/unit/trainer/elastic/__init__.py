"""Unit tests of trainer.elastic."""
