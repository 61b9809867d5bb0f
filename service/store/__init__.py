"""Durable state: the JobStore protocol and its SQLAlchemy implementation."""
