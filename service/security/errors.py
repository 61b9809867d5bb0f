"""What is raised where somebody may not come in, or not so; see `service.errors` for the rest.

ServiceError                      status  code
├── NotSignedIn                   401     not_signed_in
├── Forbidden                     403     forbidden
│   ├── ForeignOrigin                     foreign_origin
│   └── CsrfRefused                       csrf_token
├── NotFound                      404
│   └── KeyNotFound                       key_not_found
├── BodyTooLarge                  413     body_too_large
├── ForeignHost                   421     foreign_host
├── BehindProxy                   421     behind_proxy
├── TooManyRequests               429     too_many_requests (`Retry-After`)
│   └── TooManyOpen               429     too_many_open
├── SecretKeyUnusable             500     secret_key_unusable
├── IdentityProviderAway          503     identity_provider_away
└── UnsafeAddress                 (start) unsafe_address
"""

from __future__ import annotations

from service.errors import NotFound, ServiceError


class NotSignedIn(ServiceError):
    """A request without credentials, or with some that do not count."""

    status = 401
    code = "not_signed_in"
    title = "Not signed in"

    def __init__(self, cause: str = "this request carries no credentials") -> None:
        super().__init__(
            f"{cause}; send 'Authorization: Bearer KEY' with an API key "
            "(`shardloom login`, or SHARDLOOM_API_KEY)"
        )

    @property
    def headers(self) -> dict[str, str]:
        """How to sign in."""
        return {"WWW-Authenticate": 'Bearer realm="shardloom"'}


class Forbidden(ServiceError):
    """Credentials that count, but not for this."""

    status = 403
    code = "forbidden"
    title = "Forbidden"


class ForeignOrigin(Forbidden):
    """A page of another site tries to change something with the rights of a reader of ours."""

    code = "foreign_origin"

    def __init__(self, origin: str) -> None:
        super().__init__(
            f"a page of {origin[:200]} may not change anything here; SHARDLOOM_ALLOWED_ORIGINS "
            "names the sites that may"
        )


class CsrfRefused(Forbidden):
    """A change by a browser's session without the token that our own pages send."""

    code = "csrf_token"

    def __init__(self) -> None:
        super().__init__(
            "a session must send the value of its cookie 'shardloom-csrf' in the header "
            "X-CSRF-Token with whatever changes something; reload the page, or use an API key"
        )


class ForeignHost(ServiceError):
    """The request names another host than this service answers for."""

    status = 421
    code = "foreign_host"
    title = "Misdirected request"

    def __init__(self, host: str) -> None:
        super().__init__(
            f"this service does not answer for the host '{host[:200]}'; "
            "SHARDLOOM_ALLOWED_HOSTS names those it answers for"
        )


class BehindProxy(ServiceError):
    """A proxy passes requests on to a service that lets everybody in."""

    status = 421
    code = "behind_proxy"
    title = "Misdirected request"

    def __init__(self) -> None:
        super().__init__(
            "this request came through a proxy (it carries X-Forwarded-For or Forwarded), and "
            "this service asks nobody for credentials: behind a proxy it wants "
            "SHARDLOOM_AUTH=required"
        )


class BodyTooLarge(ServiceError):
    """The body of a request is larger than the service takes."""

    status = 413
    code = "body_too_large"
    title = "Body too large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"a request's body has at most {limit_bytes} bytes here")


class TooManyRequests(ServiceError):
    """A principal asks faster than it may."""

    status = 429
    code = "too_many_requests"
    title = "Too many requests"

    def __init__(self, retry_after_s: int) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"too many requests; try again in {retry_after_s} s")

    @property
    def headers(self) -> dict[str, str]:
        """When to try again."""
        return {"Retry-After": str(self.retry_after_s)}


class TooManyOpen(TooManyRequests):
    """A principal has too many requests open at the same time, followed streams among them."""

    code = "too_many_open"

    def __init__(self, limit: int) -> None:
        self.retry_after_s = 1
        ServiceError.__init__(
            self,
            f"{limit} requests or streams of this caller are open, as many as may be; "
            "close some, or raise SHARDLOOM_MAX_OPEN_REQUESTS",
        )


class IdentityProviderAway(ServiceError):
    """The keys of the identity provider cannot be had, so that no token can be checked."""

    status = 503
    code = "identity_provider_away"
    title = "Identity provider away"

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(f"cannot read the keys at {url} ({cause}); SHARDLOOM_OIDC_JWKS_URL")


class SecretKeyUnusable(ServiceError):
    """The service's own secret cannot be used."""

    code = "secret_key_unusable"
    title = "Secret key unusable"

    def __init__(self, cause: str) -> None:
        super().__init__(f"{cause} (SHARDLOOM_SECRET_KEY)")


class UnsafeAddress(ServiceError):
    """The service would listen on a network without asking who calls."""

    code = "unsafe_address"
    title = "Unsafe address"


class KeyNotFound(NotFound):
    """No API key has this id."""

    code = "key_not_found"

    def __init__(self, key_id: str) -> None:
        super().__init__(f"no API key has the id '{key_id}'; `shardloom keys list` shows them")
