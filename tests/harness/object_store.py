"""A real S3 endpoint (moto's server) for tests of remote data, with faults on demand.

The server checks signatures, which moto alone does not, and goes wrong as `Faults` says: between a
client and a healthy store there is then what networks and busy stores do.
"""

from __future__ import annotations

import logging
import math
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from moto.server import MotoRequestHandler
from werkzeug.serving import BaseWSGIServer, make_server

from tests.harness.emulated import enter_network
from trainer.storage import Location

ACCESS_KEY, SECRET_KEY = "testing", "testing-secret"

_SEGMENT_BYTES, _BURST_S = 256 * 1024, 0.01

Fault = Literal["500", "503", "slow_down", "reset", "cut", "stall"]
_XML = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
_ANSWERS = {
    "500": ("500 Internal Server Error", "InternalError"),
    "503": ("503 Service Unavailable", "ServiceUnavailable"),
    "slow_down": ("503 Slow Down", "SlowDown"),
}


@dataclass
class Faults:
    """What goes wrong: each request in `rates` of its cases, drawn by `seed`.

    `reset` and `cut` send half of a body, then break the connection off; `stall` waits for
    `stall_s` before it answers. All bodies together come at `bytes_per_s`, as over one link. `only`
    limits all to requests whose "METHOD PATH" it is found in. `counts` has what was done, and how
    often each kind of request came (`PUT part` is a part of a multi-part upload).
    """

    rates: dict[Fault, float] = field(default_factory=dict)
    seed: int = 0
    only: str = ""
    stall_s: float = 0.0
    bytes_per_s: float = math.inf
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()
        self._link_is_free_at = 0.0

    def send(self, num_bytes: int) -> None:
        """Wait until the link has taken so many bytes, after those that came before."""
        with self._lock:
            now = time.monotonic()
            begun = max(self._link_is_free_at, now - _BURST_S)
            self._link_is_free_at = begun + num_bytes / self.bytes_per_s
        time.sleep(max(0.0, self._link_is_free_at - now))

    def draw(self, request: str) -> Fault | None:
        """What happens to one request."""
        with self._lock:
            self.counts[_kind_of(request)] += 1
            if not re.search(self.only, request):
                return None
            drawn = self._random.random()
            for fault, rate in self.rates.items():
                if drawn < rate:
                    self.counts[fault] += 1
                    return fault
                drawn -= rate
        return None


def _kind_of(request: str) -> str:
    method = request.split()[0]
    return f"{method} part" if "partNumber=" in request else method


class FaultyS3:
    """A WSGI application before moto's: checks who asks, and goes wrong as it is told."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self.faults = Faults()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if refused := refusal_of(environ, ACCESS_KEY, SECRET_KEY):
            return _answer(environ, start_response, "403 Forbidden", refused)
        faults = self.faults
        fault = faults.draw(f"{environ['REQUEST_METHOD']} {environ['RAW_URI']}")
        if fault in _ANSWERS:
            return _answer(environ, start_response, *_ANSWERS[fault])
        if fault == "stall":
            time.sleep(faults.stall_s)
        body = _range_of(environ, start_response) or b"".join(self._moto(environ, start_response))
        if fault in ("reset", "cut"):
            return _break_off(environ, body, reset=fault == "reset")
        return [body] if faults.bytes_per_s == math.inf else _over_link(body, faults)


def _answer(
    environ: dict[str, Any], start_response: Callable[..., Any], status: str, code: str
) -> list[bytes]:
    # What was sent along is read, or the next request on the connection would begin with it.
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    body = b"" if environ["REQUEST_METHOD"] == "HEAD" else _XML.format(code=code).encode()
    start_response(status, [("Content-Type", "text/xml"), ("Content-Length", str(len(body)))])
    return [body]


def _break_off(environ: dict[str, Any], body: bytes, *, reset: bool) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    connection: socket.socket = environ["werkzeug.socket"]
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    raise ConnectionError("broken off on purpose")


def _over_link(body: bytes, faults: Faults) -> Iterator[bytes]:
    for start in range(0, len(body), _SEGMENT_BYTES):
        segment = body[start : start + _SEGMENT_BYTES]
        faults.send(len(segment))
        yield segment


def _range_of(environ: dict[str, Any], start_response: Callable[..., Any]) -> bytes:
    """Part of an object, where that is asked for: moto would copy the whole of it each time."""
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", environ.get("HTTP_RANGE", ""))
    bucket, _, name = environ["PATH_INFO"].lstrip("/").partition("/")
    if not asked or environ["REQUEST_METHOD"] != "GET":
        return b""
    key = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].get_object(bucket, name)
    if key is None:
        return b""
    first, last = int(asked[1]), int(asked[2])
    with key.lock:
        key._value_buffer.seek(first)
        body = key._value_buffer.read(last + 1 - first)
    place = f"bytes {first}-{first + len(body) - 1}/{key.size}"
    headers = [("Content-Range", place), ("Content-Length", str(len(body))), ("ETag", key.etag)]
    start_response("206 Partial Content", headers)
    return body


_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[^/]+)/\d+/(?P<region>[^/]+)/s3/aws4_request, *"
    r"SignedHeaders=(?P<headers>[^,]+), *Signature=(?P<signature>[0-9a-f]+)"
)


def refusal_of(environ: Mapping[str, str], access_key: str, secret_key: str) -> str | None:
    """S3's code for why a request (WSGI) is not one of `access_key`'s; None where it is."""
    found = _AUTHORIZATION.fullmatch(environ.get("HTTP_AUTHORIZATION", ""))
    if found is None:
        return "AccessDenied"
    if found["key"] != access_key:
        return "InvalidAccessKeyId"
    headers = {name: _header(environ, name) for name in found["headers"].split(";")}
    url = f"http://{environ['HTTP_HOST']}{environ['RAW_URI']}"
    request = AWSRequest(environ["REQUEST_METHOD"], url, headers)
    request.context["timestamp"] = environ["HTTP_X_AMZ_DATE"]
    signer = S3SigV4Auth(Credentials(access_key, secret_key), "s3", found["region"])
    text = signer.string_to_sign(request, signer.canonical_request(request))
    is_right = signer.signature(text, request) == found["signature"]
    return None if is_right else "SignatureDoesNotMatch"


def _header(environ: Mapping[str, str], name: str) -> str:
    variable = name.upper().replace("-", "_")
    plain = variable in ("CONTENT_TYPE", "CONTENT_LENGTH")
    return " ".join(environ.get(variable if plain else f"HTTP_{variable}", "").split())


class _Handler(MotoRequestHandler):
    protocol_version = "HTTP/1.1"

    def make_environ(self) -> dict[str, Any]:
        environ = super().make_environ()
        environ["RAW_URI"] = self.path
        return environ

    def log(self, type: str, message: str, *args: Any) -> None:
        """Nothing: faults on purpose would fill the output."""


@dataclass(frozen=True)
class ObjectStore:
    """An endpoint with one bucket; the environment holds credentials for it."""

    endpoint: str
    application: FaultyS3
    bucket: str = "data"

    def url(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}"

    def upload(self, folder: Path, key: str) -> Location:
        """Copy a folder with all files below it to a key, where it then is."""
        target = Location.parse(self.url(key))
        for path in folder.rglob("*"):
            if path.is_file():
                (target / path.relative_to(folder).as_posix()).upload(path)
        return target

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which a process reaches it."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "SHARDLOOM_STORAGE_RETRY_S": "30",
        }

    @contextmanager
    def failing(self, **faults: Any) -> Iterator[Faults]:
        """Go wrong as `Faults` has it until the block ends."""
        self.application.faults = Faults(**faults)
        try:
            yield self.application.faults
        finally:
            self.application.faults = Faults()


@contextmanager
def _serve(application: FaultyS3, address: str, network: Path | None) -> Iterator[int]:
    """Serve from a thread on that network; yields the port."""
    with ThreadPoolExecutor(1, "s3") as thread:
        if network:
            thread.submit(enter_network, network).result()
        options: dict[str, Any] = {"threaded": True, "request_handler": _Handler}
        server: BaseWSGIServer = thread.submit(
            make_server, address, 0, application, **options
        ).result()
        thread.submit(server.serve_forever)
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()


@contextmanager
def run_object_store(
    address: str = "127.0.0.1", network: Path | None = None
) -> Iterator[ObjectStore]:
    """Serve a bucket on a free port until the block ends: on loopback, or on an emulated host."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = FaultyS3()
    with _serve(application, address, network) as port, pytest.MonkeyPatch.context() as patch:
        store = ObjectStore(f"http://{address}:{port}", application)
        for name, value in store.environment.items():
            patch.setenv(name, value)
        backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        if store.bucket not in backend.buckets:
            backend.create_bucket(store.bucket, "us-east-1")
        yield store
