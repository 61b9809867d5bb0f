"""Unit tests of trainer.driver."""
