"""Follow: the events of one decision for one subscriber, from wherever it is to its rest, and what becomes of its operations.

    runs here        from the memory of its run, as they happen
    runs elsewhere   a mark has asked its holder to write them down; they are read from the database
    waits            looked at now and then, until somebody runs it
    rests            what the subscriber has not seen yet: stored, or made of the stored decision; then a receipt at a time while
                     operations move, for `stream_linger_s` at most; then the decision itself, and the stream ends

Whichever way it goes the numbers are the same, so a subscriber that comes back, to any process, names the last one it saw and
misses nothing. A run that another process took over is followed by that one's events, whose numbers are higher.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from uuid import UUID

import anyio
import msgspec

from coordinator import telemetry
from coordinator.core.decision import RESTING, Coordinator
from coordinator.core.events import QUEUED, Event, at_rest, first_of, told_again
from coordinator.core.view import DecisionView, decode_view, timestamp
from coordinator.engine.events import BATCH, EventLog
from coordinator.engine.holdings import Holdings
from coordinator.engine.show import shown
from coordinator.errors import NotFound, StreamsFull
from coordinator.store import events, reading
from coordinator.store.database import Connection, Database
from coordinator.store.reading import DecisionRow, OperationRow, ReceiptRow

Batches = AsyncGenerator[Sequence[Event], None]
"""Each is closed by whoever iterates it: they hold cursors."""
FIRST_LOOK_S, LONGEST_LOOK_S = 0.05, 0.5
RECEIPTS = 200
_encode = msgspec.json.Encoder().encode


class FollowerCut(Exception):
    """The subscriber lagged behind for too long; it may come back."""


class Streams:
    """The subscribers of one process."""

    def __init__(self, coordinator: Coordinator, database: Database, holdings: Holdings) -> None:
        self.settings = database.settings
        self.open = 0
        self._coordinator = coordinator
        self._database = database
        self._holdings = holdings

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Raises `StreamsFull`."""
        if self.open >= self.settings.max_streams:
            telemetry.STREAMS_CUT.labels("refused").inc()
            raise StreamsFull(f"{self.open} streams are open here, as many as may be", retry_after_ms=1000)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def follow(self, tenant: UUID, id: UUID, after: int) -> Batches:
        """Batches of events with a number above ``after``; an empty one when there was nothing for `stream_heartbeat_s`. Raises
        `NotFound`, `FollowerCut`."""
        row = await self._row(tenant, id)
        if after < QUEUED:
            accepted = {"at": timestamp(row.created_at), "class": row.class_}
            yield [Event(QUEUED, "queued", _encode(accepted))]
            after = QUEUED
        elif row.status not in RESTING:
            yield []
        if row.status not in RESTING:
            async with self._database.transaction(tenant) as connection:
                await events.follow(connection, tenant, id)
        while row.status not in RESTING and not self._holdings.draining:
            run = self._holdings.runs.get(id)
            here = run is not None and run.tenant == tenant
            batches = self._here(run.events, after) if run and here else self._elsewhere(row, tenant, after)
            async with aclosing(batches):
                async for batch in batches:
                    yield batch
                    after = batch[-1].number if batch else after
            row = await self._row(tenant, id)
        if row.status in RESTING:
            async with aclosing(self._at_rest(row, tenant, after)) as batches:
                async for batch in batches:
                    yield batch

    async def _row(self, tenant: UUID, id: UUID) -> DecisionRow:
        async with self._database.transaction(tenant) as connection:
            row = await reading.decision(connection, tenant, id)
        if row is None:
            raise NotFound("there is no such decision")
        return row

    async def _here(self, log: EventLog, after: int) -> Batches:
        """Until the run is over here."""
        with log.follow(after) as follower, _counted("memory"):
            while not follower.cut:
                batch = log.read(follower)
                if batch:
                    yield batch
                    log.sent(follower, len(batch))
                elif log.closed:
                    return
                elif not await follower.changed(self.settings.stream_heartbeat_s):
                    yield []
        raise FollowerCut

    async def _elsewhere(self, row: DecisionRow, tenant: UUID, after: int) -> Batches:
        """Until it rests, or runs here."""
        pause = Pause(self.settings.stream_heartbeat_s)
        with _counted("database"):
            while row.id not in self._holdings.runs and not self._holdings.draining:
                async with self._database.transaction(tenant) as connection:
                    rested = (await reading.decision(connection, tenant, row.id) or row).status in RESTING
                    batch = await events.events(connection, tenant, row.id, after=after, limit=BATCH)
                if batch:
                    yield batch
                    after = batch[-1].number
                    pause.over()
                elif rested:
                    return
                elif await pause.rest():
                    yield []

    async def _at_rest(self, row: DecisionRow, tenant: UUID, after: int) -> Batches:
        """The rest of its run, then what followed, then the decision as it stands."""
        async with self._database.transaction(tenant) as connection:
            receipts = await _receipts_since_rest(connection, tenant, row.id)
            token = _token(receipts, row)
            is_stored = await events.any_stored(connection, tenant, row.id, since=first_of(token))
        with _counted("database"):
            while batch := await self._stored(tenant, row.id, after):
                yield batch
                after = batch[-1].number
            made = [] if is_stored else _made_of(row, token)
            if unseen := [event for event in made if event.number > after]:
                yield unseen
                after = unseen[-1].number
            async with aclosing(self._what_followed(tenant, row, token, after)) as batches:
                async for later in batches:
                    yield later

    async def _stored(self, tenant: UUID, id: UUID, after: int) -> list[Event]:
        async with self._database.transaction(tenant) as connection:
            return await events.events(connection, tenant, id, after=after, limit=BATCH)

    async def _what_followed(self, tenant: UUID, row: DecisionRow, token: int, after: int) -> Batches:
        pause = Pause(self.settings.stream_heartbeat_s)
        until = time.monotonic() + self.settings.stream_linger_s
        while True:
            async with self._database.transaction(tenant) as connection:
                moving = await events.any_moving(connection, tenant, row.id)
                receipts = await _receipts_since_rest(connection, tenant, row.id)
                operations = await reading.operations_of(connection, tenant, [row.id])
                row = await reading.decision(connection, tenant, row.id) or row
            told = [_told(at_rest(token, n), receipt, operations) for n, receipt in enumerate(receipts)]
            batch = [event for event in told if event.number > after]
            over = not moving or time.monotonic() > until or self._holdings.draining
            if over and (last := at_rest(token, len(receipts)) - 1) > after:
                batch.append(Event(last, "decision", shown(self._coordinator, row, operations)))
            if batch:
                yield batch
                after = batch[-1].number
                pause.over()
            if over:
                return
            if await pause.rest():
                yield []


class Pause:
    """Longer and longer looks, and when the next heartbeat is due."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self.over()

    def over(self) -> None:
        """There was something."""
        self._next_s = FIRST_LOOK_S
        self._silent_since = time.monotonic()

    async def rest(self) -> bool:
        """Whether a heartbeat is due after it."""
        await anyio.sleep(min(self._next_s, self._heartbeat_s))
        self._next_s = min(2 * self._next_s, LONGEST_LOOK_S)
        due = time.monotonic() - self._silent_since >= self._heartbeat_s
        if due:
            self._silent_since = time.monotonic()
        return due


@contextmanager
def _counted(origin: str) -> Iterator[None]:
    gauge = telemetry.STREAMS.labels(origin)
    gauge.inc()
    try:
        yield
    finally:
        gauge.dec()


async def _receipts_since_rest(connection: Connection, tenant: UUID, id: UUID) -> Sequence[ReceiptRow]:
    """Of the decision and its operations; the first is that of its rest."""
    found: list[ReceiptRow] = []
    after = -1
    while True:
        page = await reading.receipts(connection, tenant, decision_id=id, after=after, limit=RECEIPTS)
        for receipt in page:
            thing, _, state = receipt.kind.partition(".")
            if (thing == "decision" and (found or state in RESTING)) or (thing == "operation" and found):
                found.append(receipt)
        if len(page) < RECEIPTS:
            return found
        after = page[-1].index


class _Body(msgspec.Struct):
    fencing_token: int | None = None
    code: str | None = None
    reason: str | None = None
    reference: str | None = None


def _token(receipts: Sequence[ReceiptRow], row: DecisionRow) -> int:
    """The token under which it came to rest."""
    told = msgspec.json.decode(receipts[0].body, type=_Body).fencing_token if receipts else None
    return told or row.fencing_token


def _made_of(row: DecisionRow, token: int) -> list[Event]:
    refused = row.answer_status is None or row.answer_status >= 400
    stored = (
        row.view if refused else row.answer
    )  # not as a review has changed it since: its numbers have been told
    try:
        view: DecisionView | None = decode_view(stored) if stored is not None else None
    except msgspec.ValidationError:  # stored by another version: the decision is shown at the end as it is
        view = None
    return told_again(view, token) if view else []


def _told(number: int, receipt: ReceiptRow, operations: Sequence[OperationRow]) -> Event:
    """A receipt as an event. A kind that is no state (``late-evidence``, ``taken-over``) is told by its name all the same."""
    body = msgspec.json.decode(receipt.body, type=_Body)
    thing, _, state = receipt.kind.partition(".")
    told: dict[str, object] = {"at": timestamp(receipt.at), "receipt": receipt.index}
    if thing == "operation":
        effects = {operation.id: operation.effect for operation in operations}
        told |= {"id": receipt.operation_id, "effect": effects.get(receipt.operation_id or UUID(int=0))}
        told |= {"state": state, "reference": body.reference, "reason": body.reason}
        return Event(number, "operation", _encode(told))
    told |= {"status": state, "code": body.code}
    return Event(number, "rest" if state in RESTING else "decision-receipt", _encode(told))
