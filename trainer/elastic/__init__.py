"""Durable checkpoints and recovery."""
