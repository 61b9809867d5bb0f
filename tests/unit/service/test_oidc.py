"""Bearer tokens of an identity provider: what gets in, and everything that does not."""

from __future__ import annotations

import base64
import hmac
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

from service.security.errors import IdentityProviderAway, NotSignedIn
from service.security.oidc import LEEWAY_S, Provider, TokenVerifier
from service.security.principal import Role
from service.security.provider_keys import ProviderKeys

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


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def verifier(issuer: Issuer, clock: Clock) -> TokenVerifier:
    roles = {"ml": {"ads": Role.SUBMITTER}, "boss": {"*": Role.ADMIN, "ads": Role.VIEWER}}
    provider = Provider(ISSUER, AUDIENCE, URL, "realm.roles", roles)
    return TokenVerifier(provider, httpx.MockTransport(issuer.answer), clock)


def test_a_good_token_gives_the_roles_of_its_claims(
    verifier: TokenVerifier, issuer: Issuer
) -> None:
    principal = verifier.principal_of(issuer.token())
    assert (principal.name, principal.kind) == ("oidc:ada", "oidc")
    assert dict(principal.roles) == {"ads": Role.SUBMITTER}
    both = verifier.principal_of(issuer.token(realm={"roles": ["boss", "ml"]}))
    assert dict(both.roles) == {"*": Role.ADMIN, "ads": Role.SUBMITTER}
    assert dict(verifier.principal_of(issuer.token(realm={"roles": "ml x"})).roles) == {
        "ads": Role.SUBMITTER
    }
    assert issuer.num_reads == 1


@pytest.mark.parametrize("realm", [None, "ml", 7, {"roles": None}, {"roles": [7]}, {"roles": {}}])
def test_strange_claims_give_no_role(verifier: TokenVerifier, issuer: Issuer, realm: Any) -> None:
    assert dict(verifier.principal_of(issuer.token(realm=realm)).roles) == {}


REFUSED: dict[str, dict[str, Any]] = {
    "wrong issuer": {"iss": "https://evil.example"},
    "no issuer": {"iss": None},
    "wrong audience": {"aud": "others"},
    "no audience": {"aud": None},
    "expired": {"exp": NOW - LEEWAY_S - 1},
    "no expiry": {"exp": None},
    "expiry that is no number": {"exp": "tomorrow"},
    "not yet valid": {"nbf": NOW + LEEWAY_S + 1},
    "nobody": {"sub": None},
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED.keys())
def test_claims_that_do_not_fit_are_refused(
    verifier: TokenVerifier, issuer: Issuer, changes: dict[str, Any]
) -> None:
    with pytest.raises(NotSignedIn):
        verifier.principal_of(issuer.token(**changes))


def test_clocks_may_differ_by_a_little(verifier: TokenVerifier, issuer: Issuer) -> None:
    assert verifier.principal_of(issuer.token(exp=NOW - LEEWAY_S + 2, nbf=NOW + LEEWAY_S - 2))


def _part(content: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


def _unsigned(issuer: Issuer) -> str:
    payload = issuer.token().split(".")[1]
    return f"{_part({'alg': 'none', 'kid': 'one'})}.{payload}."


def _signed_with_public_key(issuer: Issuer) -> str:
    """What a verifier takes that lets the token choose: the public key as a shared secret."""
    signed = f"{_part({'alg': 'HS256', 'kid': 'one'})}.{issuer.token().split('.')[1]}"
    mac = hmac.digest(issuer.key.as_pem(private=False), signed.encode(), "sha256")
    return f"{signed}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


def _of_a_stranger(issuer: Issuer) -> str:
    key = RSAKey.generate_key(2048, {"kid": "one"})
    payload = json.loads(base64.urlsafe_b64decode(issuer.token().split(".")[1] + "=="))
    return jwt.encode({"alg": "RS256", "kid": "one"}, payload, key)


def _with_embedded_key(issuer: Issuer) -> str:
    key = RSAKey.generate_key(2048)
    payload = json.loads(base64.urlsafe_b64decode(issuer.token().split(".")[1] + "=="))
    header = {"alg": "RS256", "kid": "one", "jwk": key.as_dict(private=False)}
    return jwt.encode(header, payload, key)


def _with_unknown_kid(issuer: Issuer) -> str:
    _, *rest = issuer.token().split(".")
    return ".".join([_part({"alg": "RS256", "kid": "nobody"}), *rest])


def _changed(issuer: Issuer) -> str:
    header, _, signature = issuer.token().split(".")
    payload = issuer.token(sub="root").split(".")[1]
    return f"{header}.{payload}.{signature}"


FORGED: list[Callable[[Issuer], str]] = [
    _unsigned,
    _signed_with_public_key,
    _of_a_stranger,
    _with_embedded_key,
    _with_unknown_kid,
    _changed,
    lambda issuer: "",
    lambda issuer: "garbage",
    lambda issuer: "a.b.c",
    lambda issuer: "e30.e30.",
    lambda issuer: ("\x00" * 10) + ".é.x",
    lambda issuer: "x" * 100_000,
    lambda issuer: issuer.token() + "x",
]


@pytest.mark.parametrize("forge", FORGED)
def test_forged_tokens_are_refused(
    verifier: TokenVerifier, issuer: Issuer, forge: Callable[[Issuer], str]
) -> None:
    token = forge(issuer)
    with pytest.raises(NotSignedIn) as caught:
        verifier.principal_of(token)
    assert len(token) < 20 or token not in str(caught.value)


def test_a_new_key_of_the_provider_is_found_without_asking_all_the_time(
    verifier: TokenVerifier, issuer: Issuer, clock: Clock
) -> None:
    verifier.principal_of(issuer.token())
    issuer.rotate("two")
    with pytest.raises(NotSignedIn):
        verifier.principal_of(issuer.token())
    assert issuer.num_reads == 1
    clock.now += 11
    assert verifier.principal_of(issuer.token())
    assert issuer.num_reads == 2
    for _ in range(5):
        with pytest.raises(NotSignedIn):
            verifier.principal_of(_with_unknown_kid(issuer))
    assert issuer.num_reads == 2
    issuer.rotate("one")


def test_keys_are_read_again_when_they_are_old_and_kept_when_the_provider_is_away(
    verifier: TokenVerifier, issuer: Issuer, clock: Clock
) -> None:
    verifier.principal_of(issuer.token())
    clock.now += 3601
    issuer.is_away = True
    assert verifier.principal_of(issuer.token(exp=clock.now + 60))
    assert issuer.num_reads == 2


def test_without_any_key_the_provider_is_said_to_be_away(
    verifier: TokenVerifier, issuer: Issuer
) -> None:
    issuer.is_away = True
    with pytest.raises(IdentityProviderAway, match="ConnectError"):
        verifier.principal_of(issuer.token())
    assert issuer.num_reads == 1


def test_a_provider_that_is_away_is_not_asked_by_every_request(
    verifier: TokenVerifier, issuer: Issuer, clock: Clock
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


class SlowProvider:
    """Answers once it is told to; `num_reads` counts who asked."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.is_asked.set()
        assert self.may_answer.wait(10)
        return self._issuer.answer(request)


def test_while_one_thread_fetches_no_other_does_and_old_keys_go_on(
    issuer: Issuer, clock: Clock
) -> None:
    slow = SlowProvider(issuer)
    keys = ProviderKeys(URL, 3600.0, httpx.MockTransport(slow.answer), clock)
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(keys.current)
        assert slow.is_asked.wait(10)
        others = [pool.submit(keys.current) for _ in range(3)]
        slow.may_answer.set()
        known = first.result(10)
        assert all(other.result(10) is known for other in others)
        assert issuer.num_reads == 1

        clock.now += 3601
        slow.is_asked.clear()
        slow.may_answer.clear()
        first = pool.submit(keys.current)
        assert slow.is_asked.wait(10)
        assert keys.current() is known
        slow.may_answer.set()
        assert first.result(10) is not known
    assert issuer.num_reads == 2
