"""Keys, access and `data` on the command line; a key is kept for one service."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.cli import common
from service.client import credentials
from service.client.client import ShardloomClient
from service.client.errors import CredentialsUnusable
from service.client.transport import RetryPolicy
from service.domain.auth import key_id_of
from service.settings import Settings
from tests.harness.builders import spec_document
from tests.harness.processes import run_program
from tests.harness.service import Guarded, GuardedApps, shardloom

URL = "https://shardloom.example"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SHARDLOOM_API_KEY", "SHARDLOOM_CA_FILE", "SHARDLOOM_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHARDLOOM_HOME", str(tmp_path / "client"))
    return tmp_path / "client"


class Wire:
    """A service behind httpx's mock transport that hears who speaks; it answers `whoami`."""

    def __init__(self) -> None:
        self.heard: list[str | None] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.heard.append(request.headers.get("authorization"))
        body = {"name": "key:ci", "kind": "key", "roles": {}, "auth": "required"}
        return httpx.Response(200, json=body)

    def client(self, url: str = URL, **options: Any) -> ShardloomClient:
        transport = httpx.MockTransport(self.answer)
        return ShardloomClient(url, transport=transport, **options)


def test_a_key_goes_to_the_service_that_it_is_for_and_to_no_other(home: Path) -> None:
    wire = Wire()
    path = credentials.keep_key(f"{URL}/", "shl_one")
    assert path.stat().st_mode & 0o777 == 0o600
    for url in (URL, f"{URL}:443", "https://shardloom.example.evil", "http://shardloom.example"):
        wire.client(url).whoami()
    assert wire.heard == ["Bearer shl_one", "Bearer shl_one", None, None]
    assert credentials.forget_key(URL)
    assert not credentials.forget_key(URL)
    wire.client().whoami()
    assert wire.heard[-1] is None


def test_the_environment_and_an_argument_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    credentials.keep_key(URL, "shl_file")
    monkeypatch.setenv("SHARDLOOM_API_KEY", "shl_environment")
    wire.client().whoami()
    wire.client(api_key="shl_argument").whoami()
    assert wire.heard == ["Bearer shl_environment", "Bearer shl_argument"]


def test_a_key_that_no_header_can_hold_is_refused_without_being_told() -> None:
    with pytest.raises(CredentialsUnusable, match="SHARDLOOM_API_KEY") as told:
        Wire().client(api_key="shl_one\nshl_two")
    assert "shl_" not in str(told.value)


def test_a_file_of_keys_that_others_can_read_is_not_used(home: Path) -> None:
    credentials.keep_key(URL, "shl_one").chmod(0o644)
    with pytest.raises(CredentialsUnusable, match="chmod 600"):
        Wire().client()


def test_ca_certificates_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLOOM_CA_FILE", "/nowhere.pem")
    with pytest.raises(CredentialsUnusable, match=r"SHARDLOOM_CA_FILE=/nowhere\.pem"):
        Wire().client()


@pytest.fixture
def house(open_guarded: GuardedApps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Guarded:
    made = open_guarded(tmp_path / "service")

    def open_client(url: str | None = None, **options: Any) -> ShardloomClient:
        options = {"retry": RetryPolicy(num_retries=0), **options}
        return ShardloomClient(url or URL, transport=made.http._transport, **options)

    monkeypatch.setattr(common, "open_client", open_client)
    monkeypatch.setenv("SHARDLOOM_URL", URL)
    return made


def test_signing_in_and_out(house: Guarded, home: Path) -> None:
    refused = shardloom("whoami")
    assert refused.exit_code == 2
    assert "shardloom login" in refused.output
    assert shardloom("login", stdin="shl_wrong\n").exit_code == 2
    assert not (home / credentials.FILE_NAME).exists()
    done = shardloom("login", stdin=f"{house.keys['viewer']}\n")
    assert done.exit_code == 0, done.output
    assert "signed in as key:viewer" in done.output
    assert house.keys["viewer"] not in done.output
    assert shardloom("login", stdin="  \n").exit_code == 2
    assert "viewer in default" in shardloom("whoami").output
    assert shardloom("logout").exit_code == 0
    assert shardloom("whoami").exit_code == 2
    mistyped = shardloom("logout", "--url", "http://shardloom.example:port")
    assert (mistyped.exit_code, "is no URL" in mistyped.output) == (2, True)


def test_keys_are_made_listed_and_revoked(house: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLOOM_API_KEY", house.keys["root"])
    made = shardloom("keys", "create", "bot", "--role", "ads=submitter", "--expires-days", "30")
    assert made.exit_code == 0, made.output
    assert made.stdout.startswith("shl_")
    assert "share a trust domain" in made.stderr
    listed = shardloom("keys", "list").stdout
    assert "ads=submitter" in listed
    assert "good for 30 days" in listed
    keys = json.loads(shardloom("keys", "list", "--json").stdout)
    key_id = next(key["id"] for key in keys if key["name"] == "bot")
    assert "is revoked" in shardloom("keys", "revoke", key_id).stdout
    assert "revoked" in shardloom("keys", "list").stdout
    shown = shardloom("audit").stdout
    assert "DELETE /v1/keys/{key_id}" in shown
    assert shardloom("audit", "--refused", "--json").stdout.strip() == "[]"


def test_a_role_that_is_none_is_refused_before_anything_is_sent() -> None:
    for role in ("ads", "=viewer", "ads=boss", "ads="):
        done = shardloom("keys", "create", "bot", "--role", role)
        assert done.exit_code == 2
        assert "PROJECT=viewer|submitter|admin" in done.output
    assert shardloom("keys", "create", "bot").exit_code == 2, "a key without any role"


def test_the_first_key_is_written_to_the_database_itself(
    open_guarded: GuardedApps, home: Path
) -> None:
    made = shardloom("keys", "create", "ops", "--admin")
    assert made.exit_code == 0, made.output
    service = open_guarded(home)
    service.keys["ops"] = made.stdout.strip()
    assert service.send("GET", "/v1/whoami", "ops").json()["roles"] == {"*": "admin"}
    assert service.settings.database_url == Settings().database_url


def test_an_administrators_key_can_be_made_again_where_only_keys_of_others_count(
    open_guarded: GuardedApps, home: Path
) -> None:
    service = open_guarded(home)
    with_key = shardloom("keys", "create", "ops", "--admin")
    assert with_key.exit_code == 3, "the service is asked, which does not listen here"
    service.security.keys.revoke_key(key_id_of(service.keys["root"]) or "", 0.0)
    made = shardloom("keys", "create", "ops", "--admin")
    assert made.exit_code == 0, made.output
    service.keys["ops"] = made.stdout.strip()
    assert service.send("GET", "/v1/whoami", "ops").json()["roles"] == {"*": "admin"}


@pytest.mark.parametrize(
    ("variable", "value"),
    [("DATABASE_URL", "postgresql://u:p@127.0.0.1:1/x"), ("AUTH", "any"), ("HOME", "/proc/none")],
)
def test_a_first_key_that_cannot_be_written_and_a_recovery_without_a_database_are_told_of(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"SHARDLOOM_{variable}", value)
    result = shardloom("keys", "create", "ops", "--admin")
    assert result.exit_code == 3, result.output
    assert result.stderr.startswith("error  ")
    assert "Traceback" not in result.output
    assert shardloom("recover").exit_code == 3


@pytest.mark.parametrize(
    "wrong", [["o p s"], ["ops", "--expires-days", "inf"], ["ops", "--expires-days", "9999"]]
)
def test_a_key_that_the_service_would_refuse_is_no_first_key(wrong: list[str], home: Path) -> None:
    result = shardloom("keys", "create", *wrong, "--admin")
    assert result.exit_code == 2, result.output
    assert not (home / "shardloom.db").exists()


def test_secrets_come_from_the_environment_or_are_asked_for(
    house: Guarded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(spec_document()))
    monkeypatch.setenv("SHARDLOOM_API_KEY", house.keys["submitter"])
    monkeypatch.setenv("DB_PASSWORD", "from-environment")
    arguments = ["submit", str(spec), "--secret", "DB_PASSWORD", "--secret", "ASKED_FOR"]
    done = shardloom(*arguments, stdin="typed-in\n")
    assert done.exit_code == 0, done.output
    assert "typed-in" not in done.output
    job_id = done.stdout.strip()
    assert house.security.read_secrets(job_id) == {
        "DB_PASSWORD": "from-environment",
        "ASKED_FOR": "typed-in",
    }
    shown = shardloom("show", job_id).stdout
    assert "ASKED_FOR  DB_PASSWORD" in shown
    assert "from-environment" not in shown


# ---- commands that need more than a client


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("pydantic_settings", "service", "keys create ops --admin"),
        ("sqlalchemy", "service", "recover"),
        ("kubernetes", "service", "data prepare movielens s3://a s3://b --on cluster"),
        ("polars", "data", "data generate movielens ratings"),
        ("torch", "service,trainer-cpu", "serve ratings"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(package: str, extra: str, command: str) -> None:
    code = "import sys; sys.modules[sys.argv.pop(1)] = None; import service.cli.main as c; c.main()"
    done = run_program([sys.executable, "-c", code, package, *command.split()])
    assert (done.returncode, "Traceback" in done.stderr) == (3, False), done.stderr
    assert f"{package} is needed" in done.stderr and f"'shardloom[{extra}]'" in done.stderr


def test_the_data_commands_are_the_trainers():
    helped = shardloom("data", "prepare", "--help").stdout
    for option in ("--on", "--namespace", "--job"):
        assert option in helped
    refused = shardloom("data", "prepare", "--job", "NAME", "movielens", "ml", "out")
    assert (refused.exit_code, "--on cluster" in refused.stderr) == (2, True)
