"""The SDK's calls about webhooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from service.api.schemas import Page
from service.api.webhook_schemas import CreateWebhook, DeliveryOut, WebhookCreated, WebhookOut
from service.client_http import Connection


class WebhookCalls(Connection):
    """Calls about webhooks. What makes or sends something is sent once."""

    def create_webhook(
        self,
        url: str,
        *,
        project: str = "default",
        kinds: Sequence[str] = (),
        description: str = "",
    ) -> WebhookCreated:
        """Let a URL hear of timeline lines; the answer has the secret, which is not shown again."""
        body = CreateWebhook.model_construct(
            url=url, project=project, kinds=list(kinds), description=description
        )
        return self._post("/v1/webhooks", WebhookCreated, body.model_dump())

    def webhooks(self, *, project: str | None = None) -> list[WebhookOut]:
        """Webhooks of a project, or all, oldest first."""
        return self._get("/v1/webhooks", Page[WebhookOut], {"project": project}).items

    def get_webhook(self, webhook: str) -> WebhookOut:
        """Read a webhook; raises `NotFound`."""
        return self._get(_path(webhook), WebhookOut)

    def change_webhook(self, webhook: str, **changes: Any) -> WebhookOut:
        """Change `url`, `kinds`, `description` or `is_active`; raises `NotFound`."""
        # Asking twice for the same changes nothing.
        response = self._with_retries(lambda: self._http.patch(_path(webhook), json=changes))
        return self._parse(response, WebhookOut)

    def delete_webhook(self, webhook: str) -> None:
        """Forget a webhook and what was not delivered yet; raises `NotFound`."""
        self._once(lambda: self._http.delete(_path(webhook)))

    def rotate_webhook(self, webhook: str) -> WebhookCreated:
        """Give a webhook a new secret, which the answer has."""
        return self._post(f"{_path(webhook)}:rotate", WebhookCreated)

    def try_webhook(self, webhook: str) -> DeliveryOut:
        """Queue a test message."""
        return self._post(f"{_path(webhook)}:test", DeliveryOut)

    def deliveries(self, webhook: str, *, state: str | None = None) -> Iterator[DeliveryOut]:
        """Messages to a webhook, newest first, fetched page by page as they are consumed."""
        after: str | None = None
        while True:
            params = {"after": after, "state": state}
            page = self._get(f"{_path(webhook)}/deliveries", Page[DeliveryOut], params)
            yield from page.items
            if page.next is None:
                return
            after = page.next

    def redeliver(self, webhook: str, delivery: int) -> DeliveryOut:
        """Send a message again, with the same id; raises `NotFound`."""
        return self._post(f"{_path(webhook)}/deliveries/{delivery}:redeliver", DeliveryOut)

    def _post(self, path: str, answer: Any, body: dict[str, Any] | None = None) -> Any:
        response = self._once(lambda: self._http.post(path, json=body))
        return self._parse(response, answer)


def _path(webhook: str) -> str:
    return f"/v1/webhooks/{quote(webhook, safe='')}"
