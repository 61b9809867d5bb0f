"""Health check of the service on this host, for container engines: `python -m service.healthcheck`.

Exits with 0 if the service answers, else with 1. It goes by the service's environment, TLS
included, and imports little: an engine runs it every few seconds.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request

from service.network import local_url

_TIMEOUT_S = 4.0


def health_url() -> str:
    """Where the service of this environment says whether it answers."""
    scheme = "https" if os.environ.get("SHARDLOOM_SSL_CERTFILE") else "http"
    host, port = os.environ.get("SHARDLOOM_HOST"), os.environ.get("SHARDLOOM_PORT")
    return f"{local_url(host or '127.0.0.1', int(port or 8700), scheme)}/healthz"


def main() -> int:
    """0 if it answers, else 1 and why not."""
    url = health_url()
    context = ssl.create_default_context()
    # Its certificate is for the name that others call it by, not for this host's own address.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=_TIMEOUT_S):
            return 0
    except (urllib.error.URLError, OSError) as error:
        print(f"{url} does not answer: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
