"""Commands about access: login, logout, whoami, keys, audit."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from service import credentials
from service.api.security_schemas import AuditOut, KeyOut, NewKey, WhoAmI
from service.client import ShardloomClient
from service.commands import context
from service.commands.context import JsonOption, UrlOption, console, error_console, print_json
from service.commands.formats import human_age

app = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys.")

_DAY_S = 86_400.0
_SHOWN_ONCE = "shown this once: keep it where only its user can read it"


def login(url: UrlOption = None) -> None:
    """Keep an API key for a service, asked for without echo, in a file that only you can read."""
    service = context.service_url(url)
    key = typer.prompt(f"API key for {service}", hide_input=True, err=True).strip()
    with ShardloomClient(service, api_key=key, retry=context.CLI_RETRY) as client:
        found = client.whoami()
    if found.kind == "local":
        error_console().print(Text("this service asks for no key; it is kept all the same"))
    path = credentials.keep_key(service, key)
    console().print(f"signed in as {found.name}; the key is in {path}")


def logout(url: UrlOption = None) -> None:
    """Forget the API key for a service."""
    service = context.service_url(url)
    is_forgotten = credentials.forget_key(service)
    console().print(f"the key for {service} is forgotten" if is_forgotten else "there was no key")


def whoami(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Say who you are to the service, and what you may do."""
    with context.open_client(url) as client:
        found = client.whoami()
    if as_json:
        print_json(found)
    else:
        console().print(_who(found))


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is, as in ci.")],
    role: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROJECT=ROLE",
            help="Role in a project: viewer, submitter or admin; repeatable.",
        ),
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Administrator of everything.")] = False,
    expires_days: Annotated[
        float | None, typer.Option(min=0.001, help="Days after which it no longer counts.")
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make an API key. The very first one is written to the database that SHARDLOOM_* names.

    That one must be made with --admin, where the service's database can be reached.
    """
    roles = _roles(role or [], admin=admin)
    expires_in_s = None if expires_days is None else expires_days * _DAY_S
    if admin and url is None and _may_bootstrap():
        made = _bootstrap(name, roles, expires_in_s)
    else:
        with context.open_client(url) as client:
            made = client.create_key(name, roles, expires_in_s=expires_in_s)
    if as_json:
        print_json(made)
        return
    error_console().print(Text(f"key {made.id} of {made.name}, {_SHOWN_ONCE}", style="dim"))
    typer.echo(made.key)


@app.command("list")
def list_keys(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List API keys; their secrets are known to nobody."""
    found: list[KeyOut] = []
    with context.open_client(url) as client:
        after: str | None = None
        while True:
            page = client.list_keys(after=after)
            found += page.items
            after = page.next
            if after is None:
                break
    if as_json:
        print_json(found)
    else:
        console().print(_key_table(found, time.time()))


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the key.")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """End an API key and the sessions that were opened with it."""
    with context.open_client(url) as client:
        found = client.revoke_key(key_id)
    if as_json:
        print_json(found)
    else:
        console().print(f"key {found.id} ({found.name}) is revoked")


def audit(
    actor: Annotated[str | None, typer.Option(help="Only what this one did, as key:ci.")] = None,
    object: Annotated[str | None, typer.Option(help="Only changes of this path.")] = None,
    refused: Annotated[bool, typer.Option("--refused", help="Only what was refused.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Lines, newest first.")] = 50,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show who changed what, when, from where, and with what result."""
    with context.open_client(url) as client:
        found = client.audit(actor=actor, object=object, refused=refused, limit=limit).items
    if as_json:
        print_json(found)
    else:
        console().print(_audit_table(found))


def _roles(given: list[str], *, admin: bool) -> dict[str, Any]:
    roles: dict[str, Any] = {"*": "admin"} if admin else {}
    for text in given:
        project, _, role = text.rpartition("=")
        if not project or role not in ("viewer", "submitter", "admin"):
            raise typer.BadParameter(f"'{text}': a role reads PROJECT=viewer|submitter|admin")
        roles[project] = role
    if not roles:
        raise typer.BadParameter("say what the key may do: --role PROJECT=ROLE, or --admin")
    return roles


def _may_bootstrap() -> bool:
    """Whether the database of the settings has no key yet, so that nobody could ask for one."""
    from service.security.bootstrap import has_no_key

    return has_no_key()


def _bootstrap(name: str, roles: dict[str, Any], expires_in_s: float | None) -> NewKey:
    from service.security.bootstrap import create_first_key

    return create_first_key(name, roles, expires_in_s)


def _who(found: WhoAmI) -> Text:
    roles = ", ".join(f"{role} in {project}" for project, role in found.roles.items())
    return Text.assemble((found.name, "bold"), f"  ({found.kind})  ", roles or "no role")


def _key_table(keys: list[KeyOut], now: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("Id", "Name", "Roles", "Made", "Last used", "State"):
        table.add_column(title, no_wrap=True)
    for key in keys:
        roles = ", ".join(f"{project}={role}" for project, role in key.roles.items())
        used = human_age(key.last_used_at, now) if key.last_used_at else "never"
        table.add_row(
            key.id, key.name, roles, human_age(key.created_at, now), used, _state(key, now)
        )
    return table


def _state(key: KeyOut, now: float) -> Text:
    if key.revoked_at is not None:
        return Text("revoked", style="red")
    if key.expires_at is None:
        return Text("good", style="green")
    if key.expires_at <= now:
        return Text("expired", style="red")
    return Text(f"good for {(key.expires_at - now) / _DAY_S:.0f} days", style="green")


def _audit_table(lines: list[AuditOut]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("Time", "Who", "From", "What", "Object", "Status"):
        table.add_column(title, no_wrap=True)
    for line in lines:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.time))
        status = Text(str(line.status), style="red" if line.status >= 400 else "green")
        table.add_row(moment, line.actor, line.remote, line.action, line.object, status)
    return table
