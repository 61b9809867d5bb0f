"""Unit tests of trainer.elastic.coordinator.server."""
