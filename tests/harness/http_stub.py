"""A local HTTP server that keeps what it is sent, and answers what a test says."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Received:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class HttpStub:
    """What a server was sent; `statuses` are its next answers, the last one for ever.

    Each answer has these `headers` and this `body`.
    """

    port: int = 0
    statuses: list[int] = field(default_factory=lambda: [200])
    received: list[Received] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def take(self, request: Received) -> int:
        self.received.append(request)
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]


@contextmanager
def http_stub(*statuses: int, tls: ssl.SSLContext | None = None) -> Iterator[HttpStub]:
    stub = HttpStub(statuses=list(statuses) or [200])

    class _Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status = stub.take(Received(self.path, headers, body))
            self.send_response(status)
            for name, value in stub.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(stub.body)))
            self.end_headers()
            self.wfile.write(stub.body)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    stub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
