"""The Python SDK: `from service.client import ShardloomClient`."""

from service.client.client import ShardloomClient
from service.client.transport import DEFAULT_URL, RetryPolicy

__all__ = ["DEFAULT_URL", "RetryPolicy", "ShardloomClient"]
