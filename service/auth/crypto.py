"""The service's own secret, and the keys that are derived from it, one for each purpose.

SHARDLOOM_SECRET_KEY, or the file `secret-key` (mode 0600) under the service's home, which is made
on first use. Several secrets, separated by commas, are a rotation: the first one signs and
encrypts, all of them verify and decrypt. Replicas of the service must have the same.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from functools import lru_cache
from pathlib import Path
from typing import Literal

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from service.errors import SecretKeyUnusable
from service.files import create_once, make_private
from service.settings import Settings

FILE_NAME = "secret-key"
ATTEMPT_TOKEN_PREFIX = "sla_"
_MIN_CHARS = 32
# Codes are what the driver of an attempt exchanges for its token, once; by seals the service
# recognises what it wrote to run storage.
Purpose = Literal[
    "attempt-codes", "attempt-tokens", "csrf-tokens", "export-seals", "job-seals", "ray-tokens"
]


class MasterKeys:
    """Signs attempt tokens and encrypts job secrets; the newest of `masters` comes first."""

    def __init__(self, masters: tuple[str, ...]) -> None:
        if not masters or any(len(master) < _MIN_CHARS for master in masters):
            raise SecretKeyUnusable(f"a secret key has at least {_MIN_CHARS} characters")
        self._masters = masters
        fernets = [Fernet(base64.urlsafe_b64encode(_derive(m, "job-secrets"))) for m in masters]
        self._box = MultiFernet(fernets)

    def encrypt(self, text: str) -> str:
        return self._box.encrypt(text.encode()).decode()

    def decrypt(self, sealed: str) -> str:
        """The text of `encrypt`; raises `SecretKeyUnusable` if no key fits."""
        try:
            return self._box.decrypt(sealed.encode()).decode()
        except InvalidToken:
            raise SecretKeyUnusable(
                "a stored secret cannot be decrypted: it was stored under another secret key; "
                "add that key behind the present one, after a comma"
            ) from None

    def attempt_token(self, attempt_id: str) -> str:
        """The bearer token of an attempt's driver, the same whenever it is made."""
        return f"{ATTEMPT_TOKEN_PREFIX}{attempt_id}.{self.mac('attempt-tokens', attempt_id)}"

    def attempt_of(self, token: str) -> str | None:
        """The attempt that a token is for; None if the token is not one of ours."""
        if not token.startswith(ATTEMPT_TOKEN_PREFIX):
            return None
        attempt_id, _, mac = token.removeprefix(ATTEMPT_TOKEN_PREFIX).rpartition(".")
        is_ours = attempt_id and self.is_mac("attempt-tokens", attempt_id, mac)
        return attempt_id if is_ours else None

    def ray_token(self, attempt_id: str) -> str:
        """The token of the Ray of an attempt that shares it with no other.

        By the oldest of the keys: while these are rotated heads that run go on to know it.
        """
        return self._macs("ray-tokens", attempt_id)[-1]

    def mac(self, purpose: Purpose, text: str) -> str:
        return self._macs(purpose, text)[0]

    def is_mac(self, purpose: Purpose, text: str, mac: str) -> bool:
        """Whether `mac` made this of a text, under any of the keys."""
        made = self._macs(purpose, text)
        return any(hmac.compare_digest(each.encode(), mac.encode()) for each in made)

    def _macs(self, purpose: Purpose, text: str) -> list[str]:
        """The MAC of a text under each master, the newest first."""
        keys = [_derive(master, purpose) for master in self._masters]
        return [hmac.new(key, text.encode(), hashlib.sha256).hexdigest() for key in keys]


@lru_cache(maxsize=256)
def _derive(master: str, purpose: str) -> bytes:
    info = f"shardloom/{purpose}".encode()
    return HKDF(SHA256(), length=32, salt=None, info=info).derive(master.encode())


def master_keys_of(settings: Settings) -> MasterKeys:
    """The keys that the settings name; raises `SecretKeyUnusable`."""
    given = settings.secret_key.get_secret_value() if settings.secret_key else None
    return _keys(given, settings.home)


@lru_cache(maxsize=16)
def _keys(given: str | None, home: Path) -> MasterKeys:
    text = given if given is not None else _read_or_create(home / FILE_NAME)
    return MasterKeys(tuple(part.strip() for part in text.split(",") if part.strip()))


def _read_or_create(path: Path) -> str:
    try:
        make_private(path.parent)
        if not path.exists():
            create_once(path, secrets.token_urlsafe(48))
        if path.stat().st_mode & 0o077:
            raise SecretKeyUnusable(f"{path} can be read by others: chmod 600 {path}")
        return path.read_text().strip()
    except OSError as error:
        raise SecretKeyUnusable(f"cannot use {path} ({error.strerror}); check its rights") from None
