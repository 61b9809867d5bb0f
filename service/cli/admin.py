"""Commands of administrators: access, API keys, audit log, database, projects, queue, webhooks."""

from __future__ import annotations

import itertools
import time
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from service.cli import common
from service.cli.common import (
    HERE,
    Client,
    JsonOption,
    UrlOption,
    console,
    error_console,
    print_answer,
    print_hint,
    print_json,
    print_line,
)
from service.cli.render import plain_table
from service.client import credentials
from service.domain.auth import AuditRecord
from service.domain.membership import span_text
from service.errors import ServiceError
from service.local.state import StackError
from service.schemas.admin import (
    CreateKey,
    DeliveryOut,
    KeyOut,
    NewKey,
    ProjectOut,
    WebhookCreated,
    WebhookOut,
)
from service.schemas.jobs import QueueOut
from service.schemas.wording import age, due, duration, of_limit

keys_app = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys.")
_DAY_S = 86_400.0


def login(url: UrlOption = None) -> None:
    """Keep an API key for a service, asked for without echo, in a file that only you can read."""
    service = common.service_url(url)
    key = typer.prompt(f"API key for {service}", hide_input=True, err=True).strip()
    if not key:
        raise typer.BadParameter("no key was typed; `shardloom keys create` prints one")
    with common.open_client(service, api_key=key) as client:
        found = client.whoami()
    if found.kind == "local":
        error_console().print("this service asks for no key; it is kept all the same")
    path = credentials.keep_key(service, key)
    console().print(f"signed in as {found.name}; the key is in {path}")


def logout(url: UrlOption = None) -> None:
    """Forget the API key for a service."""
    service = common.service_url(url)
    is_forgotten = credentials.forget_key(service)
    console().print(f"the key for {service} is forgotten" if is_forgotten else "there was no key")


def whoami(client: Client = HERE, as_json: JsonOption = False) -> None:
    """Say who you are to the service, and what you may do."""
    found = client.whoami()
    roles = ", ".join(f"{role} in {project}" for project, role in found.roles.items())
    who = Text.assemble((found.name, "bold"), f"  ({found.kind})  ", roles or "no role")
    print_answer(found, who, as_json=as_json)


@keys_app.command("create")
def create_key(
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
    """Make an API key. An administrator's first is written to the database that SHARDLOOM_* names.

    So is one where all before it have expired or are revoked: with --admin, where the service's
    database can be reached.
    """
    roles = _roles(role or [], admin=admin)
    expires_in_s = None if expires_days is None else expires_days * _DAY_S
    try:
        CreateKey(name=name, roles=roles, expires_in_s=expires_in_s)
    except ValidationError as error:
        faults = (f"{fault['loc'][0]}: {fault['msg']}" for fault in error.errors())
        raise typer.BadParameter("; ".join(faults)) from None
    made = _first_key(name, roles, expires_in_s) if admin and url is None else None
    if made is None:
        with common.open_client(url) as client:
            made = client.create_key(name, roles, expires_in_s=expires_in_s)
    hint = "shown this once: keep it where only its user can read it"
    print_line(made, made.key, f"key {made.id} of {made.name}, {hint}", as_json=as_json)
    if not as_json:
        print_hint(
            "roles bound requests, not code: jobs of one Ray cluster share a trust domain, those "
            "of isolated projects have clusters of their own (docs/guides/operating.md, What is "
            "isolated)"
        )


@keys_app.command("list")
def list_keys(client: Client = HERE, as_json: JsonOption = False) -> None:
    """List API keys, without their secrets, which are not stored."""
    found = list(client.iter_keys())
    print_answer(found, _key_table(found, time.time()), as_json=as_json)


@keys_app.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the key.")],
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """End an API key and the sessions that were opened with it."""
    found = client.revoke_key(key_id)
    print_answer(found, f"key {found.id} ({found.name}) is revoked", as_json=as_json)


def audit(
    actor: Annotated[str | None, typer.Option(help="Only what this one did, as key:ci.")] = None,
    object: Annotated[str | None, typer.Option(help="Only changes of this path.")] = None,
    refused: Annotated[bool, typer.Option("--refused", help="Only what was refused.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Lines, newest first.")] = 50,
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """Show who changed what, when, from where, and with what result."""
    found = client.audit(actor=actor, object=object, refused=refused, limit=limit).items
    print_answer(found, _audit_table(found), as_json=as_json)


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


def _first_key(name: str, roles: dict[str, Any], expires_in_s: float | None) -> NewKey | None:
    """An administrator's key, made in the database of the settings; None where that has one."""
    from service.auth.security import create_first_key
    from service.settings import faults_of

    try:
        made = create_first_key(name, roles, expires_in_s)
    except ValidationError as error:
        raise StackError(f"settings cannot be used: {'; '.join(faults_of(error))}") from None
    except (ServiceError, OSError) as error:
        raise StackError(f"the first key cannot be written to the database: {error}") from None
    if made is None:
        return None
    key, text = made
    return NewKey.model_validate({**vars(key), "key": text})


def _key_table(keys: list[KeyOut], now: float) -> Table:
    table = plain_table("Id", "Name", "Roles", "Made", "Last used", "State")
    for key in keys:
        roles = ", ".join(f"{project}={role}" for project, role in key.roles.items())
        used = age(key.last_used_at, now) if key.last_used_at else "never"
        table.add_row(key.id, key.name, roles, age(key.created_at, now), used, _key_state(key, now))
    return table


def _key_state(key: KeyOut, now: float) -> Text:
    if key.revoked_at is not None:
        return Text("revoked", style="red")
    if key.expires_at is None:
        return Text("good", style="green")
    if key.expires_at <= now:
        return Text("expired", style="red")
    return Text(f"good for {(key.expires_at - now) / _DAY_S:.0f} days", style="green")


def _audit_table(lines: list[AuditRecord]) -> Table:
    table = plain_table("Time", "Who", "From", "What", "Object", "Status")
    for line in lines:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.time))
        status = Text(str(line.status), style="red" if line.status >= 400 else "green")
        table.add_row(moment, line.actor, line.remote, line.action, line.object, status)
    return table


# ---- the database


def migrate() -> None:
    """Bring the service's database to this version; run it where SHARDLOOM_DATABASE_URL is set.

    Several at once wait for the first. The service does the same when it starts.
    """
    # It opens the database, which needs what the CLI itself does not import.
    from service.db.migrate import main

    raise typer.Exit(main())


# ---- projects

projects_app = typer.Typer(no_args_is_help=True, help="Quotas of projects, and what is in use.")
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the project.")]


@projects_app.command("list")
def list_projects(client: Client = HERE, as_json: JsonOption = False) -> None:
    """List projects that have quotas or jobs that have not ended."""
    found = client.projects()
    empty = "no projects yet; `project: NAME` in a spec makes one"
    print_answer(found, _projects_table(found), as_json=as_json, empty=empty)


@projects_app.command("show")
def show_project(name: NameArgument, client: Client = HERE, as_json: JsonOption = False) -> None:
    """Show the quotas of a project and what its jobs hold."""
    found = client.project(name)
    print_answer(found, _projects_table([found]), as_json=as_json)


@projects_app.command("set")
def set_quotas(
    name: NameArgument,
    max_workers: Annotated[
        int | None, typer.Option(min=0, help="Most workers at the same time (default: as set).")
    ] = None,
    max_running_jobs: Annotated[
        int | None, typer.Option(min=0, help="Most jobs at the same time (default: as set).")
    ] = None,
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """Set quotas of a project; what runs already is left to run.

    One that is not given stays as it is; `projects remove` lifts both.
    """
    given = {"max_workers": max_workers, "max_running_jobs": max_running_jobs}
    for known in client.projects():
        if known.name == name:
            given = {key: getattr(known, key) if n is None else n for key, n in given.items()}
    changed = client.set_quotas(name, **given)
    print_answer(changed, _projects_table([changed]), as_json=as_json)


@projects_app.command("remove")
def remove_project(name: NameArgument, client: Client = HERE, as_json: JsonOption = False) -> None:
    """Take the quotas of a project away; its jobs stay."""
    client.remove_quotas(name)
    answer = {"name": name, "removed": True}
    print_line(answer, f"project {name} has no quotas any more", as_json=as_json)


def _projects_table(projects: list[ProjectOut]) -> Table:
    table = plain_table("PROJECT", "WORKERS", "RUNNING", "QUEUED")
    for each in projects:
        table.add_row(
            each.name,
            of_limit(each.num_workers, each.max_workers),
            of_limit(each.num_running_jobs, each.max_running_jobs),
            str(each.num_queued_jobs),
        )
    return table


# ---- the queue


def queue(client: Client = HERE, as_json: JsonOption = False) -> None:
    """Show who waits for workers, in which order and why, and who holds them."""
    found = client.queue()
    if as_json:
        print_json(found)
        return
    if not found.waiting and not found.running:
        console().print("nothing waits and nothing runs")
    if found.waiting:
        console().print(_waiting_table(found, time.time()))
    if found.running:
        console().print(_running_table(found))


def _waiting_table(found: QueueOut, now: float) -> Table:
    table = plain_table(
        "#", "JOB", "NAME", "PROJECT", "PRIORITY", "WORKERS", "WAITS", "STARTS", "WHY"
    )
    for job in found.waiting:
        table.add_row(
            "-" if job.position is None else str(job.position),
            job.id,
            job.name,
            job.project,
            str(job.priority),
            span_text(job.min_workers, job.world_size),
            duration(max(0.0, now - job.waits_since)),
            due(job.expected_start_at, now),
            job.reason,
        )
    return table


def _running_table(found: QueueOut) -> Table:
    table = plain_table("RUNS", "NAME", "PROJECT", "PRIORITY", "WORKERS", "")
    for job in found.running:
        makes_way = f"makes way for {job.preempted_by}" if job.preempted_by else "pauses"
        table.add_row(
            job.id,
            job.name,
            job.project,
            str(job.priority),
            str(job.num_workers),
            makes_way if job.is_pausing else "",
        )
    return table


# ---- webhooks

webhooks_app = typer.Typer(no_args_is_help=True, help="Send events of jobs to URLs.")
WebhookArgument = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Its id.")]
KindOption = Annotated[
    list[str] | None,
    typer.Option("--kind", help="Kind of timeline line, as in job_ended; repeatable (all)."),
]


@webhooks_app.command("create")
def create_webhook(
    target: Annotated[str, typer.Argument(metavar="URL", help="Where messages go.")],
    project: Annotated[str, typer.Option(help="Project, or * for every one.")] = "default",
    kind: KindOption = None,
    description: Annotated[str, typer.Option(help="What it is for.")] = "",
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """Make a webhook, and print the secret that its messages are signed with."""
    made = client.create_webhook(target, project=project, kinds=kind or (), description=description)
    _print_secret(made, as_json=as_json)


@webhooks_app.command("list")
def list_webhooks(
    project: Annotated[str | None, typer.Option(help="Only of this project.")] = None,
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """List webhooks."""
    found = client.webhooks(project=project)
    empty = "no webhooks; `shardloom webhooks create URL` makes one"
    print_answer(found, _webhooks_table(found), as_json=as_json, empty=empty)


@webhooks_app.command("change")
def change_webhook(
    webhook: WebhookArgument,
    target: Annotated[str | None, typer.Option("--to", help="Another URL.")] = None,
    kind: KindOption = None,
    on: Annotated[bool | None, typer.Option("--on/--off", help="Switch it on or off.")] = None,
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """Change a webhook, or switch it off or on again."""
    wanted = {"url": target, "kinds": kind, "is_active": on}
    changes = {name: value for name, value in wanted.items() if value is not None}
    changed = client.change_webhook(webhook, **changes)
    print_answer(changed, _webhooks_table([changed]), as_json=as_json)


@webhooks_app.command("delete")
def delete_webhook(webhook: WebhookArgument, client: Client = HERE) -> None:
    """Forget a webhook and what was not delivered yet."""
    client.delete_webhook(webhook)


@webhooks_app.command("rotate")
def rotate_secret(
    webhook: WebhookArgument, client: Client = HERE, as_json: JsonOption = False
) -> None:
    """Give a webhook a new secret."""
    made = client.rotate_webhook(webhook)
    _print_secret(made, as_json=as_json)


@webhooks_app.command("test")
def send_test(webhook: WebhookArgument, client: Client = HERE, as_json: JsonOption = False) -> None:
    """Send a test message."""
    queued = client.try_webhook(webhook)
    line = f"queued as {queued.id}; `shardloom webhooks deliveries {webhook}` tells more"
    print_line(queued, line, as_json=as_json)


@webhooks_app.command("deliveries")
def list_deliveries(
    webhook: WebhookArgument,
    state: Annotated[str | None, typer.Option(help="pending, delivered or dead.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many of the newest.")] = 20,
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """List messages to a webhook, newest first."""
    found = list(itertools.islice(client.deliveries(webhook, state=state), limit))
    print_answer(found, _deliveries_table(found, time.time()), as_json=as_json)


@webhooks_app.command("redeliver")
def redeliver(
    webhook: WebhookArgument,
    delivery: Annotated[int, typer.Argument(metavar="DELIVERY", help="Its number.")],
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """Send a message again."""
    queued = client.redeliver(webhook, delivery)
    print_line(queued, f"message {queued.message_id} goes out again", as_json=as_json)


def _print_secret(made: WebhookCreated, *, as_json: bool) -> None:
    hint = f"webhook {made.id}; the secret that signs its messages, shown this once"
    print_line(made, made.secret, hint, as_json=as_json)


def _webhooks_table(found: list[WebhookOut]) -> Table:
    table = plain_table("ID", "PROJECT", "URL", "KINDS", "STATE")
    for each in found:
        state = "on" if each.is_active else f"off  {each.note}".rstrip()
        table.add_row(each.id, each.project, each.url, " ".join(each.kinds) or "all", state)
    return table


def _deliveries_table(found: list[DeliveryOut], now_s: float) -> Table:
    table = plain_table("DELIVERY", "KIND", "JOB", "MADE", "TRIES", "STATE")
    for each in found:
        table.add_row(
            str(each.id),
            each.kind,
            each.job_id or "",
            age(each.created_at, now_s),
            str(each.num_tries),
            _delivery_state(each, now_s),
        )
    return table


def _delivery_state(delivery: DeliveryOut, now_s: float) -> str:
    parts = [delivery.state]
    if delivery.state == "pending" and delivery.num_tries:
        parts.append(f"next in {duration(max(0.0, delivery.next_try_at - now_s))}")
    return "  ".join([*parts, delivery.message]).rstrip()
