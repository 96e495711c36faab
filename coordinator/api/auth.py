"""Who is calling: `Authorization: Bearer <key>`, checked against the database and remembered for a few seconds.

Keys are remembered by their text, known and unknown ones apart, so that guesses cannot push out keys that are in use; both are
bounded, and the oldest goes first. Callers that come with one key at the same moment share one look-up. An unknown tenant, an
unknown secret and a revoked key take the same path and get the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Set
from weakref import WeakValueDictionary

import anyio
from litestar.types import Scope

from coordinator.api.headers import values
from coordinator.errors import MissingScope, Unauthenticated
from coordinator.store.database import Database
from coordinator.store.keys import Key, find_key, tenant_of

MAX_REMEMBERED = 4096
MAX_TOKEN_LENGTH = 256


class _Remembered:
    """Keys by their text, each until its time; bounded."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._entries: dict[str, tuple[float, Key | None]] = {}

    def get(self, token: str) -> tuple[float, Key | None] | None:
        entry = self._entries.get(token)
        return entry if entry is not None and entry[0] > time.monotonic() else None

    def put(self, token: str, key: Key | None) -> None:
        self._entries.pop(token, None)
        if len(self._entries) >= MAX_REMEMBERED:
            del self._entries[next(iter(self._entries))]
        self._entries[token] = (time.monotonic() + self._seconds, key)

    def drop(self, token: str) -> None:
        self._entries.pop(token, None)


class Keys:
    """The API keys of a database. ``remember_s``: how long an answer of the database counts."""

    def __init__(self, database: Database, remember_s: float) -> None:
        self._database = database
        self._known = _Remembered(remember_s)
        self._unknown = _Remembered(remember_s)
        self._looking: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()

    async def caller(self, scope: Scope) -> Key:
        """The key that the request carries. Raises `Unauthenticated`."""
        token = _bearer(scope)
        remembered = self._known.get(token) or self._unknown.get(token)
        key = remembered[1] if remembered else await self._look_up(token)
        if key is None:
            raise _not_valid()
        return key

    async def _look_up(self, token: str) -> Key | None:
        tenant = tenant_of(token)
        if tenant is None:
            return None
        async with self._looking.setdefault(token, anyio.Lock()):
            remembered = self._known.get(token) or self._unknown.get(token)
            if remembered:
                return remembered[1]
            async with self._database.transaction(tenant) as connection:
                key = await find_key(connection, tenant, token)
            self._known.drop(token)
            (self._unknown if key is None else self._known).put(token, key)
            return key


def check_scope(key: Key, any_of: Set[str]) -> None:
    """Raises `MissingScope` unless the key has one of the scopes."""
    if key.scopes.isdisjoint(any_of):
        needed = sorted(any_of)
        raise MissingScope(f"This needs a key with the scope {' or '.join(needed)}.", scopes=needed)


def _bearer(scope: Scope) -> str:
    given = values(scope, b"authorization")
    if not given:
        raise Unauthenticated("Send Authorization: Bearer <key>.")
    scheme, _, token = given[0].partition(" ")
    token = token.strip(" ")
    if len(given) > 1 or scheme.lower() != "bearer" or not 1 <= len(token) <= MAX_TOKEN_LENGTH:
        raise _not_valid()
    return token


def _not_valid() -> Unauthenticated:
    return Unauthenticated("This is not the text of a valid API key.")
