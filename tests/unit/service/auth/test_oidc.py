"""Bearer tokens of an identity provider: what gets in, and everything that does not."""

from __future__ import annotations

import base64
import hmac
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

from service.auth.oidc import LEEWAY_S, ProviderKeys, TokenVerifier
from service.domain.auth import Role
from service.errors import IdentityProviderAway, NotSignedIn
from service.settings import Settings
from tests.harness.clock import FakeClock
from tests.harness.wait import scaled

NOW = 1_800_000_000.0
ISSUER, AUDIENCE, URL = "https://id.example", "shardloom", "https://id.example/jwks"


class Issuer:
    """An identity provider with keys of its own; `num_reads` counts looks at what it publishes."""

    def __init__(self) -> None:
        self.key = RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})
        self.published = [self.key]
        self.num_reads = 0
        self.is_away = False

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.num_reads += 1
        if self.is_away:
            raise httpx.ConnectError("no route")
        return httpx.Response(200, json=KeySet(self.published).as_dict(private=False))

    def rotate(self, kid: str) -> None:
        self.key = RSAKey.generate_key(2048, {"kid": kid, "use": "sig"})
        self.published = [self.key]

    def token(self, **changes: Any) -> str:
        claims = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": "ada",
            "exp": NOW + 600,
            "iat": NOW,
            "realm": {"roles": ["ml", "unknown"]},
        }
        header = {"alg": "RS256", "kid": self.key.kid}
        kept = {name: value for name, value in {**claims, **changes}.items() if value is not None}
        return jwt.encode(header, kept, self.key)


@pytest.fixture(scope="module")
def shared_issuer() -> Issuer:
    return Issuer()


@pytest.fixture
def issuer(shared_issuer: Issuer) -> Issuer:
    shared_issuer.num_reads, shared_issuer.is_away = 0, False
    shared_issuer.published = [shared_issuer.key]
    return shared_issuer


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


@pytest.fixture
def verifier(issuer: Issuer, clock: FakeClock) -> TokenVerifier:
    settings = Settings(
        oidc_issuer=ISSUER,
        oidc_audience=AUDIENCE,
        oidc_jwks_url=URL,
        oidc_roles_claim="realm.roles",
        oidc_roles={"ml": {"ads": "submitter"}, "boss": {"*": "admin", "ads": "viewer"}},
    )
    return TokenVerifier(settings, httpx.MockTransport(issuer.answer), clock)


def test_a_good_token_gives_the_roles_of_its_claims(
    verifier: TokenVerifier, issuer: Issuer
) -> None:
    principal = verifier.principal_of(issuer.token())
    assert (principal.name, principal.kind) == ("oidc:ada", "oidc")
    assert dict(principal.roles) == {"ads": Role.SUBMITTER}
    for roles in (["boss", "ml"], ["ml", "boss"]):
        both = verifier.principal_of(issuer.token(realm={"roles": roles}))
        assert dict(both.roles) == {"*": Role.ADMIN, "ads": Role.SUBMITTER}
    assert dict(verifier.principal_of(issuer.token(realm={"roles": "ml x"})).roles) == {
        "ads": Role.SUBMITTER
    }
    assert issuer.num_reads == 1


def test_strange_claims_give_no_role(verifier: TokenVerifier, issuer: Issuer) -> None:
    for realm in (None, "ml", 7, {"roles": None}, {"roles": [7]}, {"roles": {}}):
        assert dict(verifier.principal_of(issuer.token(realm=realm)).roles) == {}


def test_claims_that_do_not_fit_are_refused(verifier: TokenVerifier, issuer: Issuer) -> None:
    refused: list[dict[str, Any]] = [
        {"iss": "https://evil.example"},
        {"iss": None},
        {"aud": "others"},
        {"aud": None},
        {"exp": NOW - LEEWAY_S - 1},
        {"exp": None},
        {"exp": "tomorrow"},
        {"nbf": NOW + LEEWAY_S + 1},
        {"sub": None},
    ]
    for changes in refused:
        with pytest.raises(NotSignedIn):
            verifier.principal_of(issuer.token(**changes))
    # Clocks may differ by a little.
    assert verifier.principal_of(issuer.token(exp=NOW - LEEWAY_S + 2, nbf=NOW + LEEWAY_S - 2))


def _part(content: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


def _with_unknown_kid(issuer: Issuer) -> str:
    _, *rest = issuer.token().split(".")
    return ".".join([_part({"alg": "RS256", "kid": "nobody"}), *rest])


def _forged(issuer: Issuer) -> list[str]:
    header, payload, signature = issuer.token().split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    known = {"alg": "RS256", "kid": "one"}
    stranger = RSAKey.generate_key(2048, {"kid": "one"})
    # What a verifier takes that lets the token choose: the public key as a shared secret.
    shared = f"{_part({**known, 'alg': 'HS256'})}.{payload}"
    mac = hmac.digest(issuer.key.as_pem(private=False), shared.encode(), "sha256")
    return [
        f"{_part({**known, 'alg': 'none'})}.{payload}.",
        f"{shared}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}",
        jwt.encode(known, claims, stranger),
        jwt.encode({**known, "jwk": stranger.as_dict(private=False)}, claims, stranger),
        f"{header}.{issuer.token(sub='root').split('.')[1]}.{signature}",
        _with_unknown_kid(issuer),
        *("", "garbage", "a.b.c", "e30.e30.", "\x00" * 10 + ".é.x", "x" * 100_000),
        issuer.token() + "x",
    ]


def test_forged_tokens_are_refused(verifier: TokenVerifier, issuer: Issuer) -> None:
    for token in _forged(issuer):
        with pytest.raises(NotSignedIn) as caught:
            verifier.principal_of(token)
        assert len(token) < 20 or token not in str(caught.value)


@pytest.mark.parametrize("moved_s", [11, -20], ids=["later", "clock set back"])
def test_a_new_key_of_the_provider_is_found_without_asking_all_the_time(
    verifier: TokenVerifier, issuer: Issuer, clock: FakeClock, moved_s: int
) -> None:
    verifier.principal_of(issuer.token())
    issuer.rotate("two")
    with pytest.raises(NotSignedIn):
        verifier.principal_of(issuer.token())
    assert issuer.num_reads == 1
    clock.now += moved_s
    assert verifier.principal_of(issuer.token())
    assert issuer.num_reads == 2
    for _ in range(5):
        with pytest.raises(NotSignedIn):
            verifier.principal_of(_with_unknown_kid(issuer))
    assert issuer.num_reads == 2
    issuer.rotate("one")


def test_a_provider_that_is_away_is_not_asked_by_every_request(
    verifier: TokenVerifier, issuer: Issuer, clock: FakeClock
) -> None:
    issuer.is_away = True
    for _ in range(5):
        with pytest.raises(IdentityProviderAway, match="ConnectError"):
            verifier.principal_of(issuer.token())
    assert issuer.num_reads == 1
    issuer.is_away = False
    clock.now += 11
    assert verifier.principal_of(issuer.token())
    clock.now += 3601
    issuer.is_away = True
    for _ in range(5):
        assert verifier.principal_of(issuer.token(exp=clock.now + 60))
    assert issuer.num_reads == 3


def test_while_one_thread_fetches_no_other_does_and_old_keys_go_on(
    issuer: Issuer, clock: FakeClock
) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        is_asked.set()
        assert may_answer.wait(scaled(10))
        return issuer.answer(request)

    keys = ProviderKeys(URL, httpx.MockTransport(answer), clock)
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(keys.current)
        assert is_asked.wait(scaled(10))
        others = [pool.submit(keys.current) for _ in range(3)]
        may_answer.set()
        known = first.result(scaled(10))
        assert all(other.result(scaled(10)) is known for other in others)
        assert issuer.num_reads == 1

        clock.now += 3601
        is_asked.clear()
        may_answer.clear()
        first = pool.submit(keys.current)
        assert is_asked.wait(scaled(10))
        assert keys.current() is known
        may_answer.set()
        assert first.result(scaled(10)) is not known
    assert issuer.num_reads == 2
