"""Unit tests of trainer.sinks."""
