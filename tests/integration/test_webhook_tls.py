"""A webhook over HTTPS goes to the address that was checked, and to whoever has the name."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from service.webhook_net import post
from service.webhooks import Answer

NAME = "hooks.test"


def _make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of NAME that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, private


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[tuple[int, Path, list[str]]]:
    """Port and certificate of an HTTPS server, and the Host headers that it was sent."""
    hosts: list[str] = []

    class _Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            hosts.append(self.headers["host"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return None

    certificate, private = _make_certificate(tmp_path)
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, private)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1], certificate, hosts
    server.shutdown()
    server.server_close()
    thread.join()


def _send(name: str, port: int, certificate: Path) -> Answer:
    async def _resolve(host: str, _: int) -> list[str]:
        assert host == name
        return ["127.0.0.1"]

    async def _post() -> Answer:
        trusted = ssl.create_default_context(cafile=str(certificate))
        return await post(
            f"https://{name}:{port}/in",
            "{}",
            {},
            allowed=[ipaddress.ip_network("127.0.0.0/8")],
            timeout_s=10.0,
            resolve=_resolve,
            transport=httpx.AsyncHTTPTransport(verify=trusted),
        )

    return asyncio.run(_post())


def test_the_name_is_what_the_certificate_is_checked_for(
    receiver: tuple[int, Path, list[str]],
) -> None:
    port, certificate, hosts = receiver
    assert _send(NAME, port, certificate).status_code == 204
    assert hosts == [f"{NAME}:{port}"]


def test_a_server_without_the_name_hears_nothing(receiver: tuple[int, Path, list[str]]) -> None:
    port, certificate, hosts = receiver
    answer = _send("other.test", port, certificate)
    assert answer.status_code is None
    assert "CERTIFICATE_VERIFY_FAILED" in answer.message
    assert hosts == []
