"""Every route of the app has a rule, and keeps to it: routes x roles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Mount

from service.auth.permissions import RULES, Rule, Scope, allows, rule_of
from service.domain.auth import LOCAL, Principal, Role
from tests.harness.service import Guarded, guarded

CALLERS = (None, "viewer", "submitter", "admin", "root")
# Rules whose handler judges again, by what the body or the object says.
_IN_DEFAULT = {"viewer": Role.VIEWER, "submitter": Role.SUBMITTER, "admin": Role.ADMIN}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = guarded(tmp_path_factory.mktemp("guarded"), dashboard=True)
    yield made
    made.http.close()
    made.store.close()


def routes_of(app: FastAPI) -> list[tuple[str, str]]:
    """Method and path template of every route but those of the pages' own application."""
    return sorted(set(_walk(app.routes)))


def _walk(routes: Any) -> Iterator[tuple[str, str]]:
    for route in routes:
        if isinstance(route, Mount):
            continue
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from _walk(inner.routes)
            continue
        for method in (route.methods or set()) - {"HEAD", "OPTIONS"}:
            yield method, route.path


def test_every_route_has_a_rule(house: Guarded) -> None:
    routes = routes_of(house.http.app)
    assert len(routes) > 20
    assert [route for route in routes if route not in RULES] == []


def _principal(caller: str | None) -> Principal | None:
    if caller is None:
        return None
    roles = {"*": Role.ADMIN} if caller == "root" else {"default": _IN_DEFAULT[caller]}
    return Principal(caller, "key", roles)


def _expected(rule: Rule, caller: str | None) -> set[int]:
    """Statuses by which the gate or the rule refuses; none where the caller is let in."""
    principal = _principal(caller)
    params = {"name": "default"}
    if rule.scope is Scope.PUBLIC:
        return set()
    if principal is None:
        return {401}
    if rule.scope is Scope.JOB:
        return set() if principal.may(rule.role, "default") else {403}
    return set() if allows(rule, principal, params) else {403}


def test_each_role_gets_what_the_table_says_of_each_route(house: Guarded) -> None:
    job_id = house.submit("root")
    wrong = []
    for method, template in routes_of(house.http.app):
        rule = rule_of(method, template)
        path = re.sub(r"\{job\}", job_id, template).replace("{name}", "default")
        path = re.sub(r"\{[a-z_]+\}", "unknown", path)
        for caller in CALLERS:
            if (method, template) == ("DELETE", "/v1/jobs/{job}"):
                path = f"/v1/jobs/{house.submit('root')}"
            answer = house.send(method, path, caller)
            refused, seen = _expected(rule, caller), answer.status_code
            is_right = seen in refused if refused else seen not in (401, 403)
            # A session ends with a form of ours, which this is not.
            if (method, template) in {("POST", "/logout"), ("POST", "/login")}:
                is_right = is_right or seen in (303, 401)
            if not is_right or seen >= 500:
                wrong.append((caller, method, path, seen, refused, answer.text[:200]))
    assert wrong == []


def test_viewers_change_nothing_and_submitters_jobs_their_code_and_sweeps_alone() -> None:
    def changed_by(role: Role) -> set[str]:
        return {path for (way, path), rule in RULES.items() if way != "GET" and rule.role is role}

    own = {
        "/login",
        "/logout",
        "/v1/attempts:claim",
        *(
            f"/v1/attempts/{{attempt_id}}/{x}"
            for x in ("events", "secrets", "logs/{source}", "outbox/{stream}")
        ),
        "/v1/attempts/{attempt_id}/files/{path:path}",
        # The project of the clone asks for more.
        "/v1/jobs/{job}:clone",
    }
    assert changed_by(Role.VIEWER) == own
    theirs = ("/v1/jobs", "/v1/sweeps")
    others = {path for path in changed_by(Role.SUBMITTER) if not path.startswith(theirs)}
    assert others == {"/v1/code", "/v1/plans"}


def test_a_route_without_a_rule_is_for_administrators_of_everything() -> None:
    rule = rule_of("GET", "/v1/of-tomorrow")
    assert not allows(rule, _principal("admin"), {})
    assert allows(rule, _principal("root"), {})


def test_an_attempt_may_do_nothing_but_deliver_for_itself() -> None:
    own = Principal("job-a-a0", "attempt")
    for (method, path), rule in RULES.items():
        is_own = path.startswith("/v1/attempts/") or rule.scope is Scope.PUBLIC
        assert allows(rule, own, {"attempt_id": "job-a-a0"}) == is_own, (method, path)
        foreign = allows(rule, own, {"attempt_id": "job-b-a0"})
        assert foreign == (rule.scope is Scope.PUBLIC), (method, path)


def test_local_mode_may_do_everything_but_read_secrets() -> None:
    refused = [path for path, rule in RULES.items() if not allows(rule, LOCAL, {})]
    assert refused == [("POST", "/v1/attempts/{attempt_id}/secrets")]
