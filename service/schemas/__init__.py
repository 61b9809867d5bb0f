"""Pydantic bodies of the REST API, shared by server, client and CLI."""
