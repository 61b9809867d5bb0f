"""Durable checkpoints: folders, saving, loading, resharding, retention."""
