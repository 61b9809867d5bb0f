"""Commands about webhooks: who hears of what, and what came of the messages."""

from __future__ import annotations

import itertools
import time
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from service.api.webhook_schemas import DeliveryOut, WebhookCreated, WebhookOut
from service.commands import context
from service.commands.context import JsonOption, UrlOption, console, error_console, print_json
from service.commands.formats import human_age, human_duration

app = typer.Typer(no_args_is_help=True, help="Let URLs hear of what happens to jobs.")

WebhookArgument = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Its id.")]
KindOption = Annotated[
    list[str] | None,
    typer.Option("--kind", help="Kind of timeline line, as in job_ended; repeatable (all)."),
]
_SHOWN_ONCE = "the secret that signs its messages, shown this once"


@app.command("create")
def create(
    target: Annotated[str, typer.Argument(metavar="URL", help="Where messages go.")],
    project: Annotated[str, typer.Option(help="Project, or * for every one.")] = "default",
    kind: KindOption = None,
    description: Annotated[str, typer.Option(help="What it is for.")] = "",
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a webhook, and print the secret that its messages are signed with."""
    with context.open_client(url) as client:
        made = client.create_webhook(
            target, project=project, kinds=kind or (), description=description
        )
    _print_secret(made, as_json=as_json)


@app.command("list")
def list_webhooks(
    project: Annotated[str | None, typer.Option(help="Only of this project.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List webhooks."""
    with context.open_client(url) as client:
        found = client.webhooks(project=project)
    if as_json:
        print_json(found)
    elif not found:
        console().print("no webhooks; `shardloom webhooks create URL` makes one")
    else:
        console().print(_table(found))


@app.command("change")
def change(
    webhook: WebhookArgument,
    target: Annotated[str | None, typer.Option("--to", help="Another URL.")] = None,
    kind: KindOption = None,
    on: Annotated[bool | None, typer.Option("--on/--off", help="Switch it on or off.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change a webhook, or switch it off or on again."""
    wanted = {"url": target, "kinds": kind, "is_active": on}
    changes = {name: value for name, value in wanted.items() if value is not None}
    with context.open_client(url) as client:
        changed = client.change_webhook(webhook, **changes)
    _show(changed, as_json=as_json)


@app.command("delete")
def delete(webhook: WebhookArgument, url: UrlOption = None) -> None:
    """Forget a webhook and what was not delivered yet."""
    with context.open_client(url) as client:
        client.delete_webhook(webhook)


@app.command("rotate")
def rotate(webhook: WebhookArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Give a webhook a new secret."""
    with context.open_client(url) as client:
        made = client.rotate_webhook(webhook)
    _print_secret(made, as_json=as_json)


@app.command("test")
def test(webhook: WebhookArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Send a test message."""
    with context.open_client(url) as client:
        queued = client.try_webhook(webhook)
    if as_json:
        print_json(queued)
    else:
        typer.echo(f"queued as {queued.id}; `shardloom webhooks deliveries {webhook}` tells more")


@app.command("deliveries")
def deliveries(
    webhook: WebhookArgument,
    state: Annotated[str | None, typer.Option(help="pending, delivered or dead.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many of the newest.")] = 20,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List messages to a webhook, newest first."""
    with context.open_client(url) as client:
        found = list(itertools.islice(client.deliveries(webhook, state=state), limit))
    if as_json:
        print_json(found)
    else:
        console().print(_deliveries_table(found, time.time()))


@app.command("redeliver")
def redeliver(
    webhook: WebhookArgument,
    delivery: Annotated[int, typer.Argument(metavar="DELIVERY", help="Its number.")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a message again."""
    with context.open_client(url) as client:
        queued = client.redeliver(webhook, delivery)
    if as_json:
        print_json(queued)
    else:
        typer.echo(f"message {queued.message_id} goes out again")


def _print_secret(made: WebhookCreated, *, as_json: bool) -> None:
    if as_json:
        print_json(made)
        return
    error_console().print(Text(f"webhook {made.id}; {_SHOWN_ONCE}", style="dim"))
    typer.echo(made.secret)


def _show(webhook: WebhookOut, *, as_json: bool) -> None:
    if as_json:
        print_json(webhook)
    else:
        console().print(_table([webhook]))


def _table(found: list[WebhookOut]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("ID", "PROJECT", "URL", "KINDS", "STATE"):
        table.add_column(heading, overflow="fold")
    for each in found:
        state = "on" if each.is_active else f"off  {each.note}".rstrip()
        table.add_row(each.id, each.project, each.url, " ".join(each.kinds) or "all", state)
    return table


def _deliveries_table(found: list[DeliveryOut], now_s: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("DELIVERY", "KIND", "JOB", "MADE", "TRIES", "STATE"):
        table.add_column(heading, overflow="fold")
    for each in found:
        table.add_row(
            str(each.id),
            each.kind,
            each.job_id or "",
            human_age(each.created_at, now_s),
            str(each.num_tries),
            _state(each, now_s),
        )
    return table


def _state(delivery: DeliveryOut, now_s: float) -> str:
    parts = [delivery.state]
    if delivery.state == "pending" and delivery.num_tries:
        parts.append(f"next in {human_duration(max(0.0, delivery.next_try_at - now_s))}")
    return "  ".join([*parts, delivery.message]).rstrip()
