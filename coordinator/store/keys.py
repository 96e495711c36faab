"""Tenants and API keys.

A key is ``ck_<tenant>.<secret>``: it names its tenant, so that looking it up is a transaction of that tenant like any other, and
carries 256 random bits, of which only the SHA-256 is stored. A guessed tenant without its secret learns nothing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import asyncpg
import msgspec

from coordinator.store.database import Connection

SCOPES = ("decide", "review", "operate", "work", "audit", "admin")

FIND = "SELECT id, scopes, classes FROM keys WHERE tenant_id = $1 AND hash = $2 AND revoked_at IS NULL"

CREATE = "INSERT INTO keys (tenant_id, id, hash, name, scopes, classes) VALUES ($1, $2, $3, $4, $5, $6)"

LIST = "SELECT id, name, scopes, classes, created_at, revoked_at FROM keys WHERE tenant_id = $1 ORDER BY id"

REVOKE = """
UPDATE keys SET revoked_at = clock_timestamp() WHERE tenant_id = $1 AND id = $2 AND revoked_at IS NULL RETURNING id
"""

TENANT = "SELECT tenant_id FROM tenants WHERE name = $1"

NEW_TENANT = """
WITH tenant AS (
    INSERT INTO tenants (tenant_id, name) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING RETURNING tenant_id
)
INSERT INTO logs (tenant_id) SELECT tenant_id FROM tenant
"""


class Key(msgspec.Struct, frozen=True):
    """Who is calling: a key of one tenant with its scopes. ``classes``: those it may ask for, None for all."""

    tenant: UUID
    id: UUID
    scopes: frozenset[str]
    classes: frozenset[str] | None = None


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    name: str
    scopes: list[str]
    classes: list[str] | None
    created_at: datetime
    revoked_at: datetime | None


def tenant_of(token: str) -> UUID | None:
    """The tenant that a key's text names, or None if it is not the text of a key."""
    prefix, _, rest = token.partition("_")
    encoded, _, secret = rest.partition(".")
    if prefix != "ck" or len(encoded) != 22 or not secret or not token.isascii():
        return None
    try:
        return UUID(bytes=base64.urlsafe_b64decode(encoded + "=="))
    except (binascii.Error, ValueError):
        return None


async def find_key(connection: Connection, tenant: UUID, token: str) -> Key | None:
    row = await connection.fetchrow(FIND, tenant, _hash(token))
    if row is None:
        return None
    classes = None if row["classes"] is None else frozenset(row["classes"])
    return Key(tenant, row["id"], frozenset(row["scopes"]), classes)


async def create_key(
    connection: Connection,
    tenant: UUID,
    id: UUID,
    name: str,
    scopes: Sequence[str],
    classes: Sequence[str] | None = None,
) -> str:
    """The key's text. It is shown this once and cannot be had again."""
    encoded = base64.urlsafe_b64encode(tenant.bytes).rstrip(b"=").decode()
    token = f"ck_{encoded}.{secrets.token_urlsafe(32)}"
    await connection.execute(CREATE, tenant, id, _hash(token), name, list(scopes), classes)
    return token


async def list_keys(connection: Connection, tenant: UUID) -> Sequence[KeyRow]:
    return [KeyRow(**row) for row in await connection.fetch(LIST, tenant)]


async def revoke_key(connection: Connection, tenant: UUID, id: UUID) -> bool:
    """Whether there was such a key, not yet revoked."""
    return await connection.fetchval(REVOKE, tenant, id) is not None


async def tenant_named(connection: asyncpg.Connection | Connection, name: str, new_id: UUID) -> UUID:
    """The tenant of that name, made if there is none. Needs the database's owner, not the app's role."""
    await connection.execute(NEW_TENANT, new_id, name)
    found: UUID = await connection.fetchval(TENANT, name)
    return found


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
