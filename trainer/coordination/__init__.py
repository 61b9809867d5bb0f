"""Ranks and their coordinator: messages, client, failure detection."""
