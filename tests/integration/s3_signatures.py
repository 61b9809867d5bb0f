"""Checks AWS signatures (version 4) of requests, which moto's server does not.

After "Authenticating Requests: Using the Authorization Header" of the S3 API reference.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, quote

_FIELDS = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[^/]+)/(?P<scope>[^,]+), *"
    r"SignedHeaders=(?P<headers>[^,]+), *Signature=(?P<signature>[0-9a-f]+)"
)


def refusal_of(environ: Mapping[str, str], access_key: str, secret_key: str) -> str | None:
    """S3's code for why a request (WSGI) is not one of `access_key`'s; None where it is."""
    found = _FIELDS.fullmatch(environ.get("HTTP_AUTHORIZATION", ""))
    if found is None:
        return "AccessDenied"
    if found["key"] != access_key:
        return "InvalidAccessKeyId"
    headers = found["headers"].split(";")
    wanted = _sign(secret_key, found["scope"], _text_to_sign(environ, found["scope"], headers))
    return None if hmac.compare_digest(wanted, found["signature"]) else "SignatureDoesNotMatch"


def _text_to_sign(environ: Mapping[str, str], scope: str, headers: list[str]) -> str:
    path, _, query = environ["RAW_URI"].partition("?")
    pairs = sorted(parse_qsl(query, keep_blank_values=True))
    canonical = [
        environ["REQUEST_METHOD"],
        path,
        "&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in pairs),
        *(f"{name}:{_header(environ, name)}" for name in headers),
        "",
        ";".join(headers),
        environ["HTTP_X_AMZ_CONTENT_SHA256"],
    ]
    digest = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
    return "\n".join(["AWS4-HMAC-SHA256", environ["HTTP_X_AMZ_DATE"], scope, digest])


def _quoted(text: str) -> str:
    return quote(text, safe="-_.~")


def _header(environ: Mapping[str, str], name: str) -> str:
    variable = name.upper().replace("-", "_")
    plain = variable in ("CONTENT_TYPE", "CONTENT_LENGTH")
    return " ".join(environ.get(variable if plain else f"HTTP_{variable}", "").split())


def _sign(secret_key: str, scope: str, text: str) -> str:
    key = f"AWS4{secret_key}".encode()
    for part in (*scope.split("/"), text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key.hex()
