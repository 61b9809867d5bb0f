"""Webhooks over HTTP: made, read, changed, tried, forgotten; secrets shown once."""

from __future__ import annotations

from typing import Any

import pytest

from service.store.tables import metadata
from tests.unit.service.api_house import Api, problem_in

URL = "https://hooks.example/in"


def _create(api: Api, **fields: Any) -> dict[str, Any]:
    response = api.http.post("/v1/webhooks", json={"url": URL, **fields})
    assert response.status_code == 201, response.text
    body: dict[str, Any] = response.json()
    return body


def test_a_secret_is_shown_once_and_stored_sealed(api: Api) -> None:
    created = _create(api)
    secret = created["secret"]
    assert secret.startswith("whsec_")
    path = f"/v1/webhooks/{created['id']}"
    for response in (api.http.get(path), api.http.get("/v1/webhooks")):
        assert secret not in response.text
        assert "secret" not in response.text
    with api.store.engine.connect() as connection:
        stored = connection.execute(metadata.tables["webhooks"].select()).mappings().one()
    assert secret not in str(dict(stored))
    rotated = api.http.post(f"{path}:rotate").json()
    assert rotated["secret"] not in ("", secret)


def test_webhooks_are_listed_by_project(api: Api) -> None:
    first, second = _create(api), _create(api, project="ml", kinds=["job_ended"])
    ids = [item["id"] for item in api.http.get("/v1/webhooks").json()["items"]]
    assert ids == [first["id"], second["id"]]
    [found] = api.http.get("/v1/webhooks", params={"project": "ml"}).json()["items"]
    assert (found["id"], found["kinds"]) == (second["id"], ["job_ended"])


def test_a_webhook_is_changed_and_switched_off_and_on(api: Api) -> None:
    path = f"/v1/webhooks/{_create(api)['id']}"
    changed = api.http.patch(path, json={"kinds": ["job_ended"], "is_active": False}).json()
    assert (changed["kinds"], changed["is_active"], changed["url"]) == (["job_ended"], False, URL)
    assert api.http.patch(path, json={}).json() == changed
    assert api.http.patch(path, json={"is_active": True}).json()["is_active"] is True


def test_deliveries_are_paged_newest_first(api: Api) -> None:
    path = f"/v1/webhooks/{_create(api)['id']}/deliveries"
    jobs = [api.submit() for _ in range(3)]
    page = api.http.get(path, params={"limit": 2}).json()
    assert [item["job_id"] for item in page["items"]] == [jobs[2], jobs[1]]
    rest = api.http.get(path, params={"limit": 2, "after": page["next"]}).json()
    assert [item["job_id"] for item in rest["items"]] == [jobs[0]]
    assert rest["next"] is None
    assert api.http.get(path, params={"state": "dead"}).json()["items"] == []


def test_a_test_message_is_queued_whatever_the_kinds(api: Api) -> None:
    webhook = _create(api, kinds=["job_ended"])
    response = api.http.post(f"/v1/webhooks/{webhook['id']}:test")
    assert response.status_code == 202
    assert response.json()["kind"] == "test"
    delivery = f"/v1/webhooks/{webhook['id']}/deliveries/{response.json()['id']}:redeliver"
    assert api.http.post(delivery).json()["state"] == "pending"


def test_a_forgotten_webhook_is_gone(api: Api) -> None:
    path = f"/v1/webhooks/{_create(api)['id']}"
    api.submit()
    assert api.http.delete(path).status_code == 204
    problem_in(api.http.get(path), 404, "webhook_not_found")
    problem_in(api.http.delete(path), 404, "webhook_not_found")
    problem_in(api.http.get(f"{path}/deliveries"), 404, "webhook_not_found")
    problem_in(api.http.post(f"{path}:test"), 404, "webhook_not_found")
    problem_in(api.http.post(f"{path}/deliveries/1:redeliver"), 404, "webhook_not_found")


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "http://127.0.0.1:8700/v1/jobs"},
        {"url": "http://169.254.169.254/"},
        {"url": "file:///etc/passwd"},
        {"url": ""},
        {"url": URL, "project": "../x"},
        {"url": URL, "kinds": ["Not A Kind"]},
        {"url": URL, "secret": "mine"},
        {},
    ],
)
def test_what_cannot_be_a_webhook_is_refused(api: Api, fields: dict[str, Any]) -> None:
    problem_in(api.http.post("/v1/webhooks", json=fields), 422, "invalid_request")


def test_a_url_that_leads_inside_cannot_be_slipped_in_later(api: Api) -> None:
    path = f"/v1/webhooks/{_create(api)['id']}"
    response = api.http.patch(path, json={"url": "http://[::ffff:10.0.0.1]/"})
    problem = problem_in(response, 422, "invalid_request")
    assert problem["fields"][0]["path"] == "url"
