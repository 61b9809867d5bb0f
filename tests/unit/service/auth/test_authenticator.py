"""API keys, sessions and attempt tokens: who gets in with what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from pydantic import SecretStr
from sqlalchemy import delete, update
from sqlalchemy.exc import IntegrityError

from service.api.routers import drivers
from service.auth.authenticator import Authenticator, Credentials
from service.auth.crypto import FILE_NAME, MasterKeys, master_keys_of
from service.auth.security import may_read_secrets
from service.backends.fake import Script
from service.db.auth import KeyStore
from service.db.jobs import JobStore
from service.db.tables import audit_log
from service.domain.auth import (
    CODE_TTL_S,
    LOCAL,
    ApiKey,
    AuditFilter,
    Principal,
    Role,
    fits,
    hash_of,
    key_id_of,
    login_code,
    new_key_text,
)
from service.domain.models import JobStatus
from service.errors import NotSignedIn, SecretKeyUnusable, StoreUnavailable
from service.jobs.run_storage import run_dir_of
from service.settings import Settings
from tests.harness.builders import (
    attempt_of,
    audit_record,
    live_job,
    spec_document,
    workers_started,
)
from tests.harness.clock import FakeClock
from tests.harness.service import Guarded, GuardedApps, problem_in

pytestmark = pytest.mark.every_database(slow=True)

MASTER = MasterKeys(("m" * 40,))


@pytest.fixture
def house(open_guarded: GuardedApps) -> Guarded:
    return open_guarded()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


@pytest.fixture
def keys(store: JobStore) -> KeyStore:
    return KeyStore(store.engine)


def _authenticator(
    keys: KeyStore, clock: FakeClock, *, is_open: bool = False, local_token: str | None = None
) -> Authenticator:
    return Authenticator(keys, MASTER, None, is_open, 3600.0, local_token, clock=clock)


def _add(keys: KeyStore, **changes: float) -> str:
    key_id, text = new_key_text()
    key = ApiKey(key_id, "ci", {"ads": Role.SUBMITTER}, 1000.0, "test", **changes)
    keys.add_key(key, hash_of(text))
    return text


def test_a_key_names_its_holder_and_only_its_hash_is_kept(keys: KeyStore, clock: FakeClock) -> None:
    text, authenticator = _add(keys), _authenticator(keys, clock)
    principal = authenticator.principal_of(Credentials(bearer=text))
    assert (principal.name, principal.projects) == ("key:ci", {"ads"})
    found = keys.find_key(key_id_of(text) or "")
    assert found is not None
    assert text.split("_", 2)[2] not in repr(found)
    assert fits(text, found[1])
    other_secret = text[:-1] + ("a" if text[-1] != "a" else "b")
    for spoilt in ("", "x", "shl_", "no", "shl_000000000000_" + "a" * 43, other_secret):
        with pytest.raises(NotSignedIn):
            authenticator.principal_of(Credentials(bearer=spoilt))


def test_a_key_ends_with_its_time_or_when_it_is_revoked(keys: KeyStore, clock: FakeClock) -> None:
    authenticator = _authenticator(keys, clock)
    texts = [_add(keys, expires_at=1100.0), _add(keys)]
    # Also where the clock is set back.
    for now, num_good in ((1000.0, 2), (900.0, 1), (1099.9, 1), (1100.0, 0)):
        clock.now = now
        if now == 900.0:
            keys.revoke_key(key_id_of(texts[1]) or "", now)
        for text in texts[:num_good]:
            assert authenticator.principal_of(Credentials(bearer=text))
        for text in texts[num_good:]:
            with pytest.raises(NotSignedIn):
                authenticator.principal_of(Credentials(bearer=text))


def test_the_last_use_is_noted_every_few_minutes_only(keys: KeyStore, clock: FakeClock) -> None:
    text = _add(keys)
    authenticator = _authenticator(keys, clock)
    noted = []
    for now in (1000.0, 1010.0, 1299.0, 1301.0):
        clock.now = now
        authenticator.principal_of(Credentials(bearer=text))
        noted.append(keys.list_keys()[0].last_used_at)
    assert noted == [1000.0, 1000.0, 1000.0, 1301.0]
    clock.now += 600.0
    with patch.object(keys, "note_use", side_effect=StoreUnavailable("the disk is full")) as note:
        assert authenticator.principal_of(Credentials(bearer=text))
    note.assert_called_once()


def test_a_session_lives_as_long_as_its_key_its_time_and_its_reader_want(
    keys: KeyStore, clock: FakeClock
) -> None:
    authenticator = _authenticator(keys, clock)
    text = _add(keys)
    tokens = [authenticator.sign_in(text)[0] for _ in range(3)]
    principal = authenticator.principal_of(Credentials(cookie=tokens[0]))
    assert (principal.name, principal.kind) == ("key:ci", "session")
    authenticator.sign_out(tokens[0])
    later, revoked = clock.now + 3600.0, clock.now + 600.0
    for token, now in zip(tokens, (clock.now, later, revoked), strict=True):
        clock.now = now
        if now == revoked:
            keys.revoke_key(key_id_of(text) or "", now)
        with pytest.raises(NotSignedIn):
            authenticator.principal_of(Credentials(cookie=token))


def test_local_mode_wants_its_token_or_a_key(keys: KeyStore, clock: FakeClock) -> None:
    authenticator = _authenticator(keys, clock, local_token="t" * 43)
    assert authenticator.principal_of(Credentials(bearer="t" * 43)) is LOCAL
    assert authenticator.principal_of(Credentials(bearer=_add(keys))).name == "key:ci"
    others = Credentials(), Credentials(bearer=""), Credentials("t" * 42), Credentials(cookie="t")
    for credentials in others:
        with pytest.raises(NotSignedIn):
            authenticator.principal_of(credentials)


def test_a_link_signs_one_browser_in_once_within_an_hour(keys: KeyStore, clock: FakeClock) -> None:
    authenticator = _authenticator(keys, clock, local_token="t" * 43)
    code, late = (login_code("t" * 43, clock.now) for _ in range(2))
    cookie, session = authenticator.sign_in_by_link(code)
    assert authenticator.principal_of(Credentials(cookie=cookie)) is LOCAL
    longer = f"9{code}"
    for spoilt in (code, login_code("s" * 43, clock.now), longer, "", "--", "ü"):
        with pytest.raises(NotSignedIn):
            authenticator.sign_in_by_link(spoilt)
    left, _ = authenticator.sign_in_by_link(login_code("t" * 43, clock.now))
    authenticator.sign_out(left)
    with pytest.raises(NotSignedIn):
        authenticator.principal_of(Credentials(cookie=left))
    clock.now += CODE_TTL_S
    with pytest.raises(NotSignedIn):
        authenticator.sign_in_by_link(late)
    assert clock.now >= session.expires_at
    with pytest.raises(NotSignedIn):
        authenticator.principal_of(Credentials(cookie=cookie))
    authenticator.sign_in_by_link(login_code("t" * 43, clock.now))
    assert len(authenticator._local_sessions) == 1, "the one that has ended is forgotten"
    # A service that asks for keys has no links.
    with pytest.raises(NotSignedIn):
        _authenticator(keys, clock).sign_in_by_link(login_code("", clock.now))


def test_an_open_service_asks_nobody_but_knows_attempts(keys: KeyStore, clock: FakeClock) -> None:
    authenticator = _authenticator(keys, clock, is_open=True)
    assert authenticator.principal_of(Credentials()) is LOCAL
    assert authenticator.principal_of(Credentials(bearer="shl_x")) is LOCAL
    token = MASTER.attempt_token("job-1-a0")
    assert authenticator.principal_of(Credentials(bearer=token)) == Principal("job-1-a0", "attempt")


def test_the_token_of_an_attempt_is_the_same_again_and_fits_no_other() -> None:
    token = MASTER.attempt_token("job-1-a0")
    assert token == MasterKeys(("m" * 40,)).attempt_token("job-1-a0")
    assert MASTER.attempt_of(token) == "job-1-a0"
    assert MASTER.attempt_of(token.replace("job-1-a0", "job-1-a1")) is None
    assert MASTER.attempt_of(token[:-1]) is None
    assert MASTER.attempt_of("sla_.") is None
    assert MasterKeys(("n" * 40,)).attempt_of(token) is None


def test_a_rotated_secret_key_still_reads_what_the_old_one_wrote() -> None:
    rotated = MasterKeys(("n" * 40, "m" * 40))
    sealed, token = MASTER.encrypt("pw"), MASTER.attempt_token("job-1-a0")
    assert rotated.decrypt(sealed) == "pw"
    assert rotated.attempt_of(token) == "job-1-a0"
    assert rotated.attempt_token("job-1-a0") != token
    # A head that runs is asked with the token that it was started with.
    assert rotated.ray_token("job-1-a0") == MASTER.ray_token("job-1-a0")
    with pytest.raises(SecretKeyUnusable, match="another secret key"):
        MASTER.decrypt(rotated.encrypt("pw"))


def test_the_secret_key_is_made_once_and_read_by_its_owner_only(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    first = master_keys_of(settings)
    path = settings.home / FILE_NAME
    assert path.stat().st_mode & 0o777 == 0o600
    assert MasterKeys((path.read_text(),)).attempt_of(first.attempt_token("a")) == "a"
    other = Settings(home=tmp_path / "other")
    other.home.mkdir()
    (other.home / FILE_NAME).write_text("k" * 40)
    (other.home / FILE_NAME).chmod(0o644)
    with pytest.raises(SecretKeyUnusable, match="chmod 600"):
        master_keys_of(other)
    with pytest.raises(SecretKeyUnusable, match="32 characters"):
        master_keys_of(Settings(home=tmp_path, secret_key=SecretStr("short")))


def test_the_audit_log_is_read_backwards_by_filter_and_cursor(keys: KeyStore) -> None:
    others = [audit_record(actor="key:ada", time=5.0), audit_record(status=403, time=9.0)]
    keys.append_audit([audit_record(), *others])

    def seen(before: int | None = None, limit: int = 50, **wanted: Any) -> list[int]:
        found = keys.list_audit(AuditFilter(**wanted), before=before, limit=limit)
        return [record.id for record in found]

    assert seen() == [3, 2, 1]
    assert seen(limit=2) == [3, 2]
    assert seen(before=2) == [1]
    assert seen(actor="key:ada") == [2]
    assert seen(only_refused=True) == [3]
    assert seen(since=5.0) == [3, 2]
    assert seen(object="/v1/jobs/a", action="POST /v1/jobs") == [3, 2, 1]
    assert seen(object="/v1/jobs/b") == []
    assert keys.list_audit(AuditFilter(), before=2) == [audit_record(id=1)]


def test_the_database_refuses_to_rewrite_the_audit_log(keys: KeyStore) -> None:
    keys.append_audit([audit_record()])
    for change in (update(audit_log).values(actor="x"), delete(audit_log)):
        with (
            pytest.raises((IntegrityError, StoreUnavailable), match="append-only"),
            keys.write() as connection,
        ):
            connection.execute(change)
    assert len(keys.list_audit(AuditFilter())) == 1


def test_secrets_are_kept_by_job_and_those_of_no_job_are_forgotten(keys: KeyStore) -> None:
    keys.keep_secrets("job-1", {"B": "two", "A": "one"}, 100.0)
    keys.keep_secrets("job-2", {"A": "other"}, 200.0)
    keys.keep_secrets("job-3", {}, 200.0)
    assert keys.secrets_of("job-1") == {"A": "one", "B": "two"}
    assert keys.forget_orphans(before=150.0) == 2
    assert keys.secrets_of("job-1") == {}
    assert list(keys.secrets_of("job-2")) == ["A"]


# ---- over HTTP


def test_a_key_is_shown_once_listed_without_its_secret_and_revoked_at_once(house: Guarded) -> None:
    made = house.send(
        "POST", "/v1/keys", "root", json={"name": "bot", "roles": {"default": "viewer"}}
    )
    assert made.status_code == 201
    house.keys["bot"] = made.json()["key"]
    assert house.send("GET", "/v1/whoami", "bot").json()["roles"] == {"default": "viewer"}
    listed = house.send("GET", "/v1/keys", "root")
    assert house.keys["bot"].split("_", 2)[2] not in listed.text
    assert "bot" in [key["name"] for key in listed.json()["items"]]
    page = house.send("GET", "/v1/keys", "root", params={"limit": 3}).json()
    rest = house.send("GET", "/v1/keys", "root", params={"limit": 3, "after": page["next"]}).json()
    found = [key["id"] for key in page["items"] + rest["items"]]
    assert (len(set(found)), rest["next"]) == (5, None)
    key_id = made.json()["id"]
    assert house.send("DELETE", f"/v1/keys/{key_id}", "root").json()["revoked_at"] is not None
    for body, told in (
        ({"name": "bot", "roles": {"Default": "viewer"}}, "roles.Default: must be 1 to 63 of"),
        ({"name": "bot", "roles": {"": "viewer"}}, "roles: must be 1 to 63 of"),
        ({"name": "", "roles": {"default": "viewer"}}, "name: must be 1 to 64 of"),
    ):
        assert told in house.send("POST", "/v1/keys", "root", json=body).json()["detail"]
    refused = house.send("GET", "/v1/whoami", "bot")
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert house.send("DELETE", "/v1/keys/nobody", "root").json()["code"] == "key_not_found"


def test_jobs_of_foreign_projects_do_not_exist(house: Guarded) -> None:
    mine, secret = house.submit("root"), house.submit("root", name="secret", project="hidden")
    house.add_key("guest", {"hidden": Role.VIEWER})
    listed = house.send("GET", "/v1/jobs", "viewer").json()["items"]
    assert [job["id"] for job in listed] == [mine]
    for reference in (secret, "secret", secret[:-2]):
        answer = house.send("GET", f"/v1/jobs/{reference}", "viewer")
        assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")
        assert house.send("POST", f"/v1/jobs/{reference}:cancel", "admin").status_code == 404
    assert house.send("GET", "/v1/jobs/secret", "guest").json()["id"] == secret
    refused = house.send("POST", "/v1/jobs/secret:cancel", "guest")
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    body = {"spec": spec_document(project="hidden")}
    for query in ("", "?dry_run=true"):
        refused = house.send("POST", f"/v1/jobs{query}", "submitter", json=body)
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")


def test_who_sees_a_job_clones_it_into_a_project_where_they_may_submit(house: Guarded) -> None:
    path = f"/v1/jobs/{house.submit('root')}:clone"
    house.add_key("guest", {"default": Role.VIEWER, "ads": Role.SUBMITTER})
    for caller, changes, expected in (
        ("guest", {"project": "ads"}, 201),
        ("guest", {}, 403),
        ("viewer", {}, 403),
        ("viewer", {"project": "ads"}, 403),
    ):
        answer = house.send("POST", path, caller, json={"set": changes})
        assert answer.status_code == expected, answer.text
        assert expected == 403 or answer.json()["project"] == "ads"


def test_webhooks_are_for_administrators_of_their_project(house: Guarded) -> None:
    body = {"url": "https://hooks.example/x", "project": "default"}
    own = house.send("POST", "/v1/webhooks", "admin", json=body)
    assert own.status_code == 201, own.text
    for project in ("hidden", "*"):
        foreign = {**body, "project": project}
        assert house.send("POST", "/v1/webhooks", "admin", json=foreign).status_code == 403
    wide = house.send("POST", "/v1/webhooks", "root", json={**body, "project": "*"}).json()["id"]
    assert house.send("GET", f"/v1/webhooks/{wide}", "admin").json()["code"] == "webhook_not_found"
    assert house.send("DELETE", f"/v1/webhooks/{wide}", "admin").status_code == 404
    listed = house.send("GET", "/v1/webhooks", "admin").json()["items"]
    assert [webhook["id"] for webhook in listed] == [own.json()["id"]]
    assert len(house.send("GET", "/v1/webhooks", "root").json()["items"]) == 2


def test_the_audit_log_tells_who_did_what_and_what_was_refused(house: Guarded) -> None:
    job_id = house.submit("submitter")
    house.send("POST", f"/v1/jobs/{job_id}:cancel", "viewer")
    house.send("POST", f"/v1/jobs/{job_id}:cancel")
    house.send("POST", f"/v1/jobs/{job_id}:cancel", "admin")
    house.send("GET", "/v1/jobs", "admin")
    # A dry run leaves nothing; whoever may not even ask is told of.
    for key in ("submitter", "viewer"):
        dry_run = {"params": {"dry_run": "true"}, "json": {"spec": spec_document()}}
        house.send("POST", "/v1/jobs", key, **dry_run)
    lines = house.send("GET", "/v1/audit", "root").json()["items"]
    cancel = "POST /v1/jobs/{job}:cancel"
    assert [(line["actor"], line["action"], line["status"]) for line in reversed(lines)] == [
        ("key:submitter", "POST /v1/jobs", 201),
        ("key:viewer", cancel, 403),
        ("anonymous", f"POST /v1/jobs/{job_id}:cancel", 401),
        ("key:admin", cancel, 202),
        ("key:viewer", "POST /v1/jobs", 403),
    ]
    objects = {f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}:cancel", "/v1/jobs"}
    assert {line["object"] for line in lines} == objects
    params = {"refused": "true", "actor": "key:viewer"}
    found = house.send("GET", "/v1/audit", "root", params=params).json()["items"]
    assert [line["status"] for line in found] == [403, 403]
    page = house.send("GET", "/v1/audit", "root", params={"limit": 3}).json()
    rest = house.send("GET", "/v1/audit", "root", params={"after": page["next"]}).json()
    assert [line["id"] for line in page["items"] + rest["items"]] == [5, 4, 3, 2, 1]


def test_secrets_reach_the_attempt_and_nobody_else(house: Guarded) -> None:
    body = {"spec": spec_document(), "secrets": {"DB_PASSWORD": "hunter2hunter2"}}
    job = house.send("POST", "/v1/jobs", "submitter", json=body).json()
    assert job["secret_names"] == ["DB_PASSWORD"]
    house.poll()
    attempt_id = f"{job['id']}-a0"
    record = house.backend.record(attempt_id)
    assert record is not None
    token = run_dir_of(house.settings, job["id"]).attempt(attempt_id).token_path
    assert token.stat().st_mode & 0o777 == 0o600
    house.keys["driver"] = token.read_text()
    # Whoever may use the Ray cluster reads what was submitted.
    assert house.keys["driver"] not in str(record)
    path = f"/v1/attempts/{attempt_id}/secrets"
    claim = {"json": {"claim": "c" * 32}}
    lease = path.replace("secrets", "lease")
    assert house.send("GET", lease, "driver").json() == {"is_current": True}
    answer = house.send("POST", path, "driver", **claim)
    assert answer.json() == {"secrets": {"DB_PASSWORD": "hunter2hunter2"}}
    assert answer.headers["cache-control"] == "no-store"
    for caller in ("root", "viewer"):
        assert house.send("POST", path, caller, **claim).status_code == 403
    started = workers_started()
    body = {"stream": "driver", "first_seq": 0, "events": [started.model_dump(mode="json")]}
    events = path.replace("secrets", "events")
    assert house.send("POST", events, "driver", json=body).status_code == 200
    assert house.send("POST", path, "driver", **claim).json()["detail"].startswith("attempt")
    other = house.submit("submitter")
    house.poll()
    assert house.send("POST", f"/v1/jobs/{job['id']}:cancel", "root").status_code == 202
    house.backend.play(attempt_id, Script(("failed",)))
    house.poll(3)
    assert house.send("GET", lease, "driver").json() == {"is_current": False}
    path = f"/v1/attempts/{other}-a0/secrets"
    assert house.send("POST", path, "driver", **claim).status_code == 403
    assert house.send("GET", "/v1/jobs", "driver").status_code == 403
    shown = house.send("GET", f"/v1/jobs/{job['id']}", "root")
    assert shown.json()["secret_names"] == ["DB_PASSWORD"]
    house.security.audit.flush()
    for text in (shown.text, str(record), *_contents(house.settings.home)):
        assert "hunter2hunter2" not in text


def test_secrets_are_given_to_the_first_claim_only(house: Guarded) -> None:
    body = {"spec": spec_document(), "secrets": {"DB_PASSWORD": "hunter2hunter2"}}
    job_id = house.send("POST", "/v1/jobs", "submitter", json=body).json()["id"]
    house.poll()
    attempt_id = f"{job_id}-a0"
    house.keys["driver"] = house.security.master.attempt_token(attempt_id)

    def ask(claim: str) -> httpx.Response:
        path = f"/v1/attempts/{attempt_id}/secrets"
        return house.send("POST", path, "driver", json={"claim": claim})

    # The driver sends it again when an answer was lost, also to another replica.
    driver, thief = "d" * 32, "t" * 32
    assert [ask(driver).status_code for _ in range(2)] == [200, 200]
    refused = ask(thief)
    assert (refused.status_code, "hunter2" in refused.text) == (403, False)
    house.poll()  # Stores the attempt again.
    assert (ask(thief).status_code, ask(driver).status_code) == (403, 200)


def test_a_key_makes_one_job_and_is_refused_with_other_secrets(house: Guarded) -> None:
    def submit(**secrets: str) -> Any:
        body = {"spec": spec_document(), "secrets": secrets}
        headers = {"Idempotency-Key": "k"}
        return house.send("POST", "/v1/jobs", "submitter", json=body, headers=headers)

    first, again = submit(DB="1"), submit(DB="1")
    assert (again.status_code, again.json()["id"]) == (201, first.json()["id"])
    for other in (submit(DB="2"), submit()):
        problem_in(other, 409, "idempotency_conflict")


def test_a_clone_has_secrets_of_its_own(house: Guarded) -> None:
    body = {"spec": spec_document(), "secrets": {"A": "one"}}
    job = house.send("POST", "/v1/jobs", "submitter", json=body).json()
    path = f"/v1/jobs/{job['id']}:clone"
    clone = house.send("POST", path, "submitter", json={"secrets": {"B": "two"}}).json()
    assert house.security.read_secrets(clone["id"]) == {"B": "two"}
    bare = house.send("POST", path, "submitter", json={}).json()
    assert house.security.read_secrets(bare["id"]) == {}


def test_a_secret_is_named_and_valued_like_a_variable_that_is_free(house: Guarded) -> None:
    refused: list[dict[str, object]] = [{"1A": "x"}, {"A B": "x"}, {"A": 1}, {"A": "x\x00"}]
    # These are what the processes run by.
    taken = ("PATH", "SHARDLOOM_ATTEMPT_TOKEN", "PYTHONPATH", "LD_PRELOAD")
    for secrets in (*refused, {"": "x"}, *({name: "x"} for name in taken)):
        body = {"spec": spec_document(), "secrets": secrets}
        answer = house.send("POST", "/v1/jobs", "submitter", json=body)
        assert answer.status_code == 422
        assert answer.json()["fields"][0]["path"].startswith("secrets")


def _contents(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.read_bytes().decode("latin-1")


def test_only_the_newest_attempt_of_a_job_that_starts_may_read_its_secrets() -> None:
    job, first = live_job(JobStatus.STARTING)
    second = attempt_of(job, index=1)
    retried = replace(job, current_attempt_id=second.id)
    assert [may_read_secrets(retried, each) for each in (first, second)] == [False, True]


def test_an_ended_attempt_gets_no_secrets_and_delivers_for_an_hour(
    house: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = house.submit("submitter")
    house.poll()
    attempt_id = f"{job_id}-a0"
    house.keys["driver"] = house.security.master.attempt_token(attempt_id)
    events = f"/v1/attempts/{attempt_id}/events"
    empty = {"stream": "driver", "first_seq": 0, "events": []}
    assert house.send("POST", events, "driver", json=empty).status_code == 200
    assert house.send("POST", events, json=empty).status_code == 401
    assert house.send("POST", events, "root", json=empty).status_code == 403
    house.send("POST", f"/v1/jobs/{job_id}:cancel", "submitter")
    house.poll(3)
    attempt = house.store.get_attempt(attempt_id)
    assert attempt.end_reason is not None
    assert attempt.ended_at is not None
    claim = {"claim": "c" * 32}
    refused = house.send("POST", f"/v1/attempts/{attempt_id}/secrets", "driver", json=claim)
    assert refused.status_code == 403
    assert house.send("POST", events, "driver", json=empty).status_code == 200
    clock = FakeClock(attempt.ended_at + drivers.LATE_REPORTS_S - 1)
    monkeypatch.setattr(drivers, "time", SimpleNamespace(time=clock))
    assert house.send("POST", events, "driver", json=empty).status_code == 200
    clock.now += 1
    refused = house.send("POST", events, "driver", json=empty)
    assert (refused.status_code, "too long ago" in refused.text) == (403, True)
