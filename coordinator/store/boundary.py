"""The durable boundary: every write of the path goes through here, grouped by kind, at most three per decision when all is well.

admit    a decision becomes durable
start    a queued one gets its slot
commit   it comes to rest, and its operations are promised
settle   what became of an operation
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anyio.abc import TaskGroup

from coordinator.store import admit, commit, lease, settle
from coordinator.store.database import Connection, Database
from coordinator.store.group_commit import GroupCommit


class Boundary:
    """``tasks`` owns the transactions in flight."""

    def __init__(self, database: Database, tasks: TaskGroup, kinds: commit.Kinds) -> None:
        self.database = database
        limits = {"max_batch": database.settings.max_batch, "bound": database.settings.max_waiting_commits}

        async def commit_all(
            connection: Connection, tenant: UUID, proposals: Sequence[commit.Proposal]
        ) -> Sequence[commit.Result]:
            return await commit.commit(connection, tenant, proposals, kinds=kinds)

        async def settle_all(
            connection: Connection, tenant: UUID, settlements: Sequence[settle.Settlement]
        ) -> Sequence[bool]:
            budget = database.settings.retries_per_minute
            return await settle.settle(connection, tenant, settlements, retries_per_minute=budget)

        self.admit = GroupCommit("admit", database, tasks, admit.admit, **limits)
        self.start = GroupCommit("start", database, tasks, lease.start_if_queued, **limits)
        self.commit = GroupCommit("commit", database, tasks, commit_all, **limits)
        self.settle = GroupCommit("settle", database, tasks, settle_all, **limits)
