"""The SDK's calls about access: who one is, API keys, the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from service.api.schemas import Page
from service.api.security_schemas import AuditOut, CreateKey, KeyOut, NewKey, RoleName, WhoAmI
from service.client_http import Connection


class AccessCalls(Connection):
    """Calls about access."""

    def whoami(self) -> WhoAmI:
        """Who one is to the service; raises `NotSignedIn`."""
        return self._get("/v1/whoami", WhoAmI)

    def create_key(
        self, name: str, roles: Mapping[str, RoleName], *, expires_in_s: float | None = None
    ) -> NewKey:
        """Make an API key, whose text is in the answer and nowhere else. Sent once."""
        body = CreateKey.model_construct(name=name, roles=dict(roles), expires_in_s=expires_in_s)
        response = self._once(lambda: self._http.post("/v1/keys", json=body.model_dump()))
        return self._parse(response, NewKey)

    def list_keys(self, *, after: str | None = None, limit: int = 50) -> Page[KeyOut]:
        """One page of API keys, the revoked ones included."""
        return self._get("/v1/keys", Page[KeyOut], {"after": after, "limit": limit})

    def revoke_key(self, key_id: str) -> KeyOut:
        """End an API key; raises `NotFound`. Doing it again changes nothing."""
        path = f"/v1/keys/{quote(key_id, safe='')}"
        return self._parse(self._with_retries(lambda: self._http.delete(path)), KeyOut)

    def audit(
        self,
        *,
        after: str | None = None,
        limit: int = 100,
        actor: str | None = None,
        action: str | None = None,
        object: str | None = None,
        since: float | None = None,
        refused: bool = False,
    ) -> Page[AuditOut]:
        """One page of the audit log, newest first; the filters must all fit."""
        params = {
            "after": after,
            "limit": limit,
            "actor": actor,
            "action": action,
            "object": object,
            "since": since,
            "refused": "true" if refused else None,
        }
        return self._get("/v1/audit", Page[AuditOut], params)
