"""The Python SDK; its public name is `shardloom`."""
