"""Delivery of webhooks: the sender and its SSRF-safe HTTP client."""
