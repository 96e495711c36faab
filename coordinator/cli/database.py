"""`migrate`, and `keys create|list|revoke`: what is done to the database itself, by whoever may log in to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeVar
from uuid import UUID

import asyncpg
import click
import msgspec
from uuid_utils.compat import uuid7

from coordinator.cli.place import UNREACHABLE, data_option, database, database_option, unreachable
from coordinator.cli.say import Fault, age, json_option, print_json, print_table
from coordinator.config import settings_from_env
from coordinator.errors import ConfigurationError
from coordinator.store import keys as store
from coordinator.store import migrate as migrations
from coordinator.store.database import Connection, open_database

T = TypeVar("T")

tenant_option = click.option("--tenant", default="default", show_default=True, help="Name of the tenant.")


class Created(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    name: str
    scopes: list[str]
    key: str


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    scopes: list[str]
    classes: list[str] | None
    created_at: datetime
    revoked_at: datetime | None


@click.command()
@database_option
@data_option
@json_option
def migrate(database_url: str | None, data: Path, as_json: bool) -> None:
    """Bring the database to the current schema. Safe to run at any time, and by several at once."""
    with database(database_url, data) as url:
        try:
            report = asyncio.run(migrations.migrate(url))
        except migrations.MigrationError as error:
            raise Fault(str(error)) from error
        except UNREACHABLE as error:
            raise unreachable(error) from error
    if as_json:
        print_json(report)
    elif report.created:
        click.echo("Created the schema.")
    else:
        applied = "".join(f"\n  {name}" for name in report.applied)
        click.echo(f"Applied:{applied}" if applied else "The schema is current; nothing to do.")


@click.group()
def keys() -> None:
    """API keys of a tenant. Only `create` ever shows a key's text."""


@keys.command("create")
@tenant_option
@click.option("--scope", "scopes", multiple=True, required=True, type=click.Choice(store.SCOPES))
@click.option("--class", "classes", multiple=True, help="A class it may ask for; without any: all.")
@click.option("--name", default="", help="What the key is for.")
@database_option
@data_option
@json_option
def create(
    tenant: str,
    scopes: tuple[str, ...],
    classes: tuple[str, ...],
    name: str,
    database_url: str | None,
    data: Path,
    as_json: bool,
) -> None:
    """Make a key, and the tenant if there is none of that name. The key is shown this once."""
    _check_classes(classes)
    chosen = [scope for scope in store.SCOPES if scope in scopes]
    with database(database_url, data) as url:
        made = _run(create_key(url, tenant, name, chosen, classes or None))
    if as_json:
        print_json(made)
        return
    click.echo(made.key)
    may_ask = f"; classes {', '.join(classes)}" if classes else ""
    told = f"Key {made.id} of tenant {tenant} ({', '.join(chosen)}{may_ask}). It is not shown again."
    click.echo(told, err=True)


@keys.command("list")
@tenant_option
@database_option
@data_option
@json_option
def list_(tenant: str, database_url: str | None, data: Path, as_json: bool) -> None:
    """Keys of a tenant, revoked ones included; never their text."""
    with database(database_url, data) as url:
        rows = _run(_of_tenant(url, tenant, store.list_keys))
    listed = [
        Listed(
            id=str(row.id),
            name=row.name,
            scopes=row.scopes,
            classes=row.classes,
            created_at=row.created_at,
            revoked_at=row.revoked_at,
        )
        for row in rows
    ]
    if as_json:
        print_json({"items": listed})
        return
    print_table(
        ["id", "name", "scopes", "classes", "created", "revoked"],
        (
            (
                key.id,
                key.name,
                ", ".join(key.scopes),
                ", ".join(key.classes or ["all"]),
                age(key.created_at),
                age(key.revoked_at),
            )
            for key in listed
        ),
        empty="This tenant has no keys.",
    )


@keys.command("revoke")
@click.argument("key_id", metavar="ID", type=click.UUID)
@tenant_option
@database_option
@data_option
@json_option
def revoke(key_id: UUID, tenant: str, database_url: str | None, data: Path, as_json: bool) -> None:
    """Revoke a key, by its id. Running services refuse it within seconds."""

    async def revoked(connection: Connection, tenant_id: UUID) -> bool:
        return await store.revoke_key(connection, tenant_id, key_id)

    with database(database_url, data) as url:
        done = _run(_of_tenant(url, tenant, revoked))
    if not done:
        raise Fault(
            f"Tenant {tenant} has no key {key_id} that could be revoked; see `coordinator keys list`."
        )
    if as_json:
        print_json({"id": str(key_id), "revoked": True})
    else:
        click.echo(f"Revoked {key_id}.")


def _check_classes(classes: Sequence[str]) -> None:
    """A class is what the settings say, which the services read from the same variable."""
    try:
        configured = settings_from_env().classes
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    for name in classes:
        if name not in configured:
            known = ", ".join(sorted(configured))
            raise click.UsageError(
                f"there is no class {name!r}, only {known}; set COORDINATOR_CLASSES here as for the services"
            )


async def create_key(
    url: str, tenant: str, name: str, scopes: list[str], classes: Sequence[str] | None = None
) -> Created:
    """A new key of a tenant that is made if need be."""
    connection = await asyncpg.connect(url, statement_cache_size=0)
    try:
        tenant_id = await store.tenant_named(connection, tenant, uuid7())
    finally:
        await connection.close()
    key_id = uuid7()
    async with open_database(url, settings_from_env()) as opened, opened.transaction(tenant_id) as inside:
        key = await store.create_key(inside, tenant_id, key_id, name, scopes, classes)
    return Created(id=str(key_id), tenant=tenant, name=name, scopes=scopes, key=key)


async def _of_tenant(url: str, tenant: str, work: Callable[[Connection, UUID], Awaitable[T]]) -> T:
    connection = await asyncpg.connect(url, statement_cache_size=0)
    try:
        tenant_id = await connection.fetchval(store.TENANT, tenant)
    finally:
        await connection.close()
    if tenant_id is None:
        raise Fault(f"There is no tenant {tenant!r}; `coordinator keys create --tenant {tenant}` makes one.")
    async with open_database(url, settings_from_env()) as opened, opened.transaction(tenant_id) as inside:
        return await work(inside, tenant_id)


def _run(work: Awaitable[T]) -> T:
    async def awaited() -> T:
        return await work

    try:
        return asyncio.run(awaited())
    except asyncpg.UndefinedTableError as error:
        raise Fault("The database has no schema yet; run: coordinator migrate") from error
    except UNREACHABLE as error:
        raise unreachable(error) from error
