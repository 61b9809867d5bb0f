"""The Secrets that an installation begins with: `python -m ...first_secrets PART=NAME ...`.

A hook of the chart runs it before anything else. The Secret NAME gets the keys of PART, with random
values, unless it is there: none is read, and none is changed.
"""

from __future__ import annotations

import secrets
import sys
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from service.backends.kuberay.client import SECRETS, KubeApi, KubeRefused
from service.domain.auth import new_key_text
from service.errors import BackendUnreachable
from service.settings import Settings

_TIMEOUT_S = 30.0
_random_text = partial(secrets.token_hex, 32)


def _api_key() -> dict[str, str]:
    return {"key": new_key_text()[1]}


def _database() -> dict[str, str]:
    """Of the chart's own PostgreSQL."""
    password = _random_text()
    return {
        "password": password,
        "url": f"postgresql://shardloom:{password}@postgresql/shardloom",
    }


PARTS: Mapping[str, Callable[[], dict[str, str]]] = {
    "database": _database,
    "service": lambda: {"secret_key": _random_text()},
    "rayToken": lambda: {"auth_token": _random_text()},
    "firstKey": _api_key,
    "metricsKey": _api_key,
    "redis": lambda: {"password": _random_text()},
}
"""Keys and new values by part, as `secrets` of the chart's values calls it."""


def make_secrets(api: KubeApi, wanted: Iterable[str]) -> Iterator[str]:
    """Make each PART=NAME that is not there, and say so; raises `BackendUnreachable`."""
    contents: dict[str, dict[str, str]] = defaultdict(dict)
    for each in wanted:
        part, _, name = each.partition("=")
        contents[name] |= PARTS[part]()
    for name, content in contents.items():
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "shardloom"}},
            "data": {key: b64encode(value.encode()).decode() for key, value in content.items()},
        }
        is_new = api.create_new(SECRETS, secret)
        yield f"{name} is made" if is_new else f"{name} is there and stays as it is"


def main() -> int:
    """Make those of the command line; 1, and why, where Kubernetes does not let us."""
    settings = Settings()
    try:
        api = KubeApi.open(settings.kubeconfig, settings.kuberay_namespace, _TIMEOUT_S)
        for line in make_secrets(api, sys.argv[1:]):
            print(line)
    except (BackendUnreachable, KubeRefused) as error:
        print(f"the first Secrets cannot be made: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
