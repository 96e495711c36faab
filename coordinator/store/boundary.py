"""The durable boundary: every write of the path goes through here, grouped by kind; three per decision, four if it was queued.

admit    a decision becomes durable, with what it reserves
secure   one that runs without its reservations gets them
claim    a queued one gets a slot
lock     it takes its named locks, if its type has some
commit   it comes to rest, and its operations are promised
settle   what became of an operation
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anyio.abc import TaskGroup

from coordinator.config import Settings
from coordinator.core.lock import Terms
from coordinator.store import commit, locks, queue, reserve, settle
from coordinator.store.database import Connection, Database
from coordinator.store.group_commit import GroupCommit
from coordinator.store.lease import Claim

ASKS_AGAIN = 5
"""Whoever waits for a lock has missed so many polls before it counts as gone."""


class Boundary:
    """``tasks`` owns the transactions in flight; ``by`` is as whom this process claims."""

    def __init__(self, database: Database, tasks: TaskGroup, kinds: commit.Kinds, by: Claim) -> None:
        self.database = database
        self.by = by
        limits = {"max_batch": database.settings.max_batch, "bound": database.settings.max_waiting_commits}

        async def claim_all(
            connection: Connection, tenant: UUID, wanted: Sequence[str]
        ) -> Sequence[queue.Claimed | None]:
            return await queue.claim(connection, tenant, wanted, by)

        async def lock_all(
            connection: Connection, tenant: UUID, claims: Sequence[locks.Claim]
        ) -> Sequence[locks.Granted | None]:
            return await locks.take(connection, tenant, claims, terms=terms_of(database.settings))

        async def commit_all(
            connection: Connection, tenant: UUID, proposals: Sequence[commit.Proposal]
        ) -> Sequence[commit.Result]:
            return await commit.commit(connection, tenant, proposals, kinds=kinds)

        async def settle_all(
            connection: Connection, tenant: UUID, settlements: Sequence[settle.Settlement]
        ) -> Sequence[bool]:
            budget = database.settings.retries_per_minute
            return await settle.settle(connection, tenant, settlements, retries_per_minute=budget)

        self.admit = GroupCommit("admit", database, tasks, reserve.admit_all, **limits)
        self.secure = GroupCommit("secure", database, tasks, reserve.secure_all, **limits)
        self.claim = GroupCommit("claim", database, tasks, claim_all, **limits)
        self.lock = GroupCommit("lock", database, tasks, lock_all, **limits)
        self.commit = GroupCommit("commit", database, tasks, commit_all, **limits)
        self.settle = GroupCommit("settle", database, tasks, settle_all, **limits)


def terms_of(settings: Settings) -> Terms:
    return Terms(settings.lock_margin_ms, settings.lock_patience_ms, ASKS_AGAIN * settings.lock_poll_ms)
