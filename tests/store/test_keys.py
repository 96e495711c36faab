"""API keys: only a key that exists, is its tenant's own and was not revoked opens anything (I14)."""

from __future__ import annotations

import base64
import hashlib
from uuid import UUID

import asyncpg
import pytest
from uuid_utils.compat import uuid7

from coordinator.store.database import Database
from coordinator.store.keys import Key, create_key, find_key, list_keys, revoke_key, tenant_named, tenant_of
from tests.store.given import only_row


async def new_key(database: Database, tenant: UUID, id: UUID) -> str:
    async with database.transaction(tenant) as connection:
        return await create_key(connection, tenant, id, "mine", ["decide", "audit"])


async def found(database: Database, tenant: UUID, token: str) -> Key | None:
    async with database.transaction(tenant) as connection:
        return await find_key(connection, tenant, token)


async def test_a_key_is_found_by_its_text_with_its_scopes(database: Database, tenant: UUID) -> None:
    id = uuid7()
    token = await new_key(database, tenant, id)
    assert tenant_of(token) == tenant
    assert await found(database, tenant, token) == Key(tenant, id, frozenset({"decide", "audit"}))


async def test_the_secret_is_not_stored(database: Database, tenant: UUID, root: asyncpg.Connection) -> None:
    token = await new_key(database, tenant, uuid7())
    stored = await only_row(root, "SELECT * FROM keys")
    assert stored["hash"] == hashlib.sha256(token.encode()).digest()
    assert token.rpartition(".")[2] not in str(dict(stored))


async def test_a_revoked_key_is_found_no_more_and_is_revoked_once(database: Database, tenant: UUID) -> None:
    id = uuid7()
    token = await new_key(database, tenant, id)
    async with database.transaction(tenant) as connection:
        assert await revoke_key(connection, tenant, id)
        assert not await revoke_key(connection, tenant, id)
        (listed,) = await list_keys(connection, tenant)
    assert listed.revoked_at is not None
    assert await found(database, tenant, token) is None


async def test_a_foreign_key_is_not_found_even_where_somebody_looks_for_it(
    database: Database, tenant: UUID, stranger: UUID
) -> None:
    id = uuid7()
    token = await new_key(database, tenant, id)
    assert await found(database, stranger, token) is None
    async with database.transaction(stranger) as connection:
        assert not await revoke_key(connection, stranger, id)
        assert not await revoke_key(connection, tenant, id)
        assert await list_keys(connection, tenant) == []


async def test_a_guess_that_names_the_tenant_learns_nothing(database: Database, tenant: UUID) -> None:
    token = await new_key(database, tenant, uuid7())
    assert await found(database, tenant, token[:-1] + ("A" if token[-1] != "A" else "B")) is None


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "ck_",
        "ck_.",
        "Bearer ck_x.y",
        "ck_" + "A" * 22,
        "ck_" + "A" * 22 + ".",
        "ck_" + "A" * 21 + ".secret",
        "ck_" + "!" * 22 + ".secret",
        "ck_" + "é" * 22 + ".secret",
        "ck_" + "A" * 22 + ".\ud800",
        "sk_" + base64.urlsafe_b64encode(b"0" * 16).decode()[:22] + ".secret",
    ],
)
def test_garbage_names_no_tenant(garbage: str) -> None:
    assert tenant_of(garbage) is None


async def test_a_tenant_is_made_once_whoever_asks(
    database_url: str, tenant: UUID, root: asyncpg.Connection
) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        assert await tenant_named(connection, "one", uuid7()) == tenant
    finally:
        await connection.close()
    assert await root.fetchval("SELECT count(*) FROM logs WHERE tenant_id = $1", tenant) == 1


async def test_a_key_knows_the_classes_it_may_ask_for(database: Database, tenant: UUID) -> None:
    async with database.transaction(tenant) as connection:
        token = await create_key(connection, tenant, uuid7(), "bulk only", ["decide"], ["bulk"])
    key = await found(database, tenant, token)
    assert key is not None
    assert key.classes == {"bulk"}
