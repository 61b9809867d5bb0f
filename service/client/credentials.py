"""API keys and CA certificates of a service, found without any being on a command line.

SHARDLOOM_API_KEY, or the file `credentials.json` (mode 0600) in $SHARDLOOM_HOME, which holds a key
for each service by its URL and is written by `shardloom login`, or `local-token.json` beside it,
which a service in local mode writes at each start. A key goes only to the service that it is for,
and a token of an earlier start opens nothing. SHARDLOOM_CA_FILE names the certificates (PEM) by
which to check a service's own.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from pathlib import Path

import httpx

from service.client.errors import CredentialsUnusable
from service.files import home_dir, write_private

API_KEY_VARIABLE = "SHARDLOOM_API_KEY"
CA_FILE_VARIABLE = "SHARDLOOM_CA_FILE"
FILE_NAME = "credentials.json"
LOCAL_FILE_NAME = "local-token.json"


def find_key(url: str) -> str | None:
    """The key for the service at a URL; None if there is none. Raises `CredentialsUnusable`."""
    if key := os.environ.get(API_KEY_VARIABLE, "").strip():
        return key
    return _read(credentials_path()).get(origin_of(url)) or local_token(url)


def local_token(url: str) -> str | None:
    """The token of the service at a URL that runs with this home; raises `CredentialsUnusable`."""
    return _read(home_dir() / LOCAL_FILE_NAME).get(origin_of(url))


def write_local_token(home: Path, url: str, token: str) -> None:
    """Let the programs of a home folder's user find the token of the service there; OSError."""
    write_private(home / LOCAL_FILE_NAME, json.dumps({origin_of(url): token}))


def keep_key(url: str, key: str) -> Path:
    """Store the key for a service; raises `CredentialsUnusable`. Returns the file."""
    path = credentials_path()
    _write(path, {**_read(path), origin_of(url): key})
    return path


def forget_key(url: str) -> bool:
    """Remove the key for a service; whether there was one."""
    path = credentials_path()
    kept = _read(path)
    if kept.pop(origin_of(url), None) is None:
        return False
    _write(path, kept)
    return True


def credentials_path() -> Path:
    return home_dir() / FILE_NAME


def origin_of(url: str) -> str:
    """Scheme, host and port of a URL, by which its key is found; raises `CredentialsUnusable`."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise CredentialsUnusable(
            f"{url} is no URL ({error}); one reads http://HOST:PORT"
        ) from None
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{parts.host}:{port}"


def tls_context() -> ssl.SSLContext | bool:
    """How to check a service's certificate; raises `CredentialsUnusable`."""
    path = os.environ.get(CA_FILE_VARIABLE)
    if not path:
        return True
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise CredentialsUnusable(f"{CA_FILE_VARIABLE}={path} cannot be used ({error})") from None


def _read(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_mode & 0o077:
            raise CredentialsUnusable(f"{path} can be read by others: chmod 600 {path}")
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CredentialsUnusable(f"cannot read {path} ({type(error).__name__})") from None
    return {str(url): str(key) for url, key in found.items()} if isinstance(found, dict) else {}


def _write(path: Path, kept: Mapping[str, str]) -> None:
    try:
        write_private(path, json.dumps(kept, indent=2))
    except OSError as error:
        raise CredentialsUnusable(f"cannot write {path} ({error.strerror})") from None
