"""A real S3 endpoint on loopback (moto's server) for tests of remote data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from moto.server import ThreadedMotoServer
from pyarrow import fs


@dataclass(frozen=True)
class ObjectStore:
    """An endpoint with one bucket; the environment holds credentials for it."""

    endpoint: str
    bucket: str = "data"

    def url(self, key: str) -> str:
        """URL of a key of the bucket, for `Location.parse`."""
        return f"s3://{self.bucket}/{key}"


@contextmanager
def run_object_store() -> Iterator[ObjectStore]:
    """Serve an empty bucket on a free port of loopback until the block ends."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    store = ObjectStore(f"http://{host}:{port}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        bucket = fs.S3FileSystem(
            endpoint_override=f"{host}:{port}", scheme="http", allow_bucket_creation=True
        )
        bucket.create_dir(store.bucket)
        try:
            yield store
        finally:
            server.stop()
