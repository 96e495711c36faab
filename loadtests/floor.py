"""The floor: the durable writes of a decision by pgbench, and nothing else. See the package's docstring for what it stands for.

The statements below are those of the store, for one decision instead of a batch, without its locking reads. They run on copies
of the tables in a schema of their own: same columns, defaults, checks and indexes; no row-level security, no foreign keys. The
bytes (request, answer, receipts, payload ...) are those of one decision that the service made in this run. Identifiers rise in
time as UUIDv7 do, so the indexes grow at their right edge.
"""

from __future__ import annotations

import os
import re
import subprocess
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from loadtests.world import World

Logs = Literal["one", "each"]
TABLES: Final = ("records", "record_versions", "decisions", "operations", "logs", "receipts")
SCRIPT_NAME: Final = "floor.sql"
MAX_CLIENTS: Final = 1_000

RATE: Final = re.compile(r"^tps = ([0-9.]+)", re.MULTILINE)
LATENCY: Final = re.compile(r"^latency average = ([0-9.]+) ms", re.MULTILINE)
FAILED: Final = re.compile(r"^number of failed transactions: ([0-9]+)", re.MULTILINE)
PROCESSED: Final = re.compile(r"^number of transactions actually processed: ([0-9]+)", re.MULTILINE)
STATEMENT: Final = re.compile(r"^ +([0-9.]+) +[0-9]+ +(.+)$", re.MULTILINE)

CLONE = """
CREATE SCHEMA floor AUTHORIZATION coordinator;
SET ROLE coordinator;
CREATE FUNCTION floor.id(n bigint) RETURNS uuid IMMUTABLE LANGUAGE sql RETURN lpad(to_hex(n), 32, '0')::uuid;
"""
EMPTY = f"TRUNCATE {', '.join(f'floor.{table}' for table in TABLES)}"
OPEN_LOGS = f"INSERT INTO floor.logs (tenant_id) SELECT floor.id(n) FROM generate_series(0, {MAX_CLIENTS}) n"

NUMBERS = r"""
\set n :n + 1
\set d (:n * 1000 + :client_id) * 2
\set o :d + 1
"""

ADMIT = r"""
BEGIN;
INSERT INTO floor.decisions (tenant_id, id, idempotency_key, fingerprint, type, class, status, request, record_kind, record_id,
                             requested_by, traceparent, deadline_at, lease_owner, lease_expires_at)
VALUES (floor.id(:tenant), floor.id(:d), :d::bigint::text, sha256(:request::bytea), 'three-sources', 'interactive', 'running',
        :request::json, 'load', :d::bigint::text, floor.id(1), :traceparent, clock_timestamp() + interval '30 s', floor.id(2),
        clock_timestamp() + interval '5 s')
ON CONFLICT (tenant_id, idempotency_key) DO NOTHING;
UPDATE floor.logs SET size = size + 1 WHERE tenant_id = floor.id(:tenant) RETURNING size - 1 AS at \gset
INSERT INTO floor.receipts (tenant_id, index, kind, decision_id, body)
VALUES (floor.id(:tenant), :at, 'decision.running', floor.id(:d), :running::json);
COMMIT;
"""

COMMIT = r"""
BEGIN;
INSERT INTO floor.records AS r (tenant_id, kind, id, version, data)
VALUES (floor.id(:tenant), 'load', :d::bigint::text, 1, :data::json)
ON CONFLICT (tenant_id, kind, id) DO UPDATE SET version = r.version + 1, data = excluded.data;
INSERT INTO floor.record_versions (tenant_id, kind, id, version, data, decision_id)
VALUES (floor.id(:tenant), 'load', :d::bigint::text, 1, :data::json, floor.id(:d));
UPDATE floor.decisions
SET status = 'committed', answer = :answer::json, answer_status = 201, finished_at = clock_timestamp(), lease_owner = NULL,
    lease_expires_at = NULL
WHERE tenant_id = floor.id(:tenant) AND id = floor.id(:d) AND fencing_token = 1 AND status IN ('queued', 'running');
INSERT INTO floor.operations (tenant_id, id, decision_id, decision_type, effect, ordinal, key, payload, payload_hash, guarantee,
                              linked, after, on_failure, state, traceparent, lease_owner, lease_expires_at)
VALUES (floor.id(:tenant), floor.id(:o), floor.id(:d), 'three-sources', 'load', 0, :key || :o::bigint::text, :payload::json,
        :payload_hash, :guarantee::json, false, '{}', 'keep', 'dispatching', :traceparent, floor.id(2), clock_timestamp() + interval '5 s');
UPDATE floor.logs SET size = size + 2 WHERE tenant_id = floor.id(:tenant) RETURNING size - 2 AS at \gset
INSERT INTO floor.receipts (tenant_id, index, kind, decision_id, operation_id, body)
VALUES (floor.id(:tenant), :at, 'decision.committed', floor.id(:d), NULL, :committed::json),
       (floor.id(:tenant), :at + 1, 'operation.dispatching', floor.id(:d), floor.id(:o), :dispatching::json);
COMMIT;
"""

SETTLE = r"""
BEGIN;
UPDATE floor.operations
SET state = 'succeeded', reference = :reference, sends = sends + 1, last_sent_at = clock_timestamp(), lease_owner = NULL,
    lease_expires_at = NULL, settled_at = clock_timestamp()
WHERE tenant_id = floor.id(:tenant) AND id = floor.id(:o) AND state IN ('dispatching', 'uncertain') AND fencing_token = 1;
UPDATE floor.logs SET size = size + 1 WHERE tenant_id = floor.id(:tenant) RETURNING size - 1 AS at \gset
INSERT INTO floor.receipts (tenant_id, index, kind, decision_id, operation_id, body)
VALUES (floor.id(:tenant), :at, 'operation.succeeded', floor.id(:d), floor.id(:o), :succeeded::json);
COMMIT;
"""

TENANT: Final[dict[Logs, str]] = {"one": r"\set tenant 0", "each": r"\set tenant :client_id + 1"}

# The bytes of the newest decision of the warm-up that is wholly done.
SAMPLE = """
SELECT json_build_object(
    'request', d.request::text, 'answer', d.answer::text, 'traceparent', d.traceparent, 'data', v.data::text,
    'key', left(o.key, -8), 'payload', o.payload::text, 'payload_hash', o.payload_hash, 'guarantee', o.guarantee::text,
    'reference', o.reference,
    'running', (SELECT body::text FROM receipts r WHERE r.decision_id = d.id AND r.kind = 'decision.running'),
    'committed', (SELECT body::text FROM receipts r WHERE r.decision_id = d.id AND r.kind = 'decision.committed'),
    'dispatching', (SELECT body::text FROM receipts r WHERE r.operation_id = o.id AND r.kind = 'operation.dispatching'),
    'succeeded', (SELECT body::text FROM receipts r WHERE r.operation_id = o.id AND r.kind = 'operation.succeeded'))
FROM decisions d
JOIN operations o ON o.tenant_id = d.tenant_id AND o.decision_id = d.id
JOIN record_versions v ON v.tenant_id = d.tenant_id AND v.decision_id = d.id
WHERE d.type = 'three-sources' AND o.state = 'succeeded'
ORDER BY d.id DESC LIMIT 1
"""


class FloorFailed(Exception):
    """pgbench failed or did not say what it should; the message has what it said."""


class Sample(msgspec.Struct, frozen=True):
    """What one decision of the type `three-sources` stores, as text."""

    request: str
    answer: str
    traceparent: str
    data: str
    key: str
    payload: str
    payload_hash: str
    guarantee: str
    reference: str
    running: str
    committed: str
    dispatching: str
    succeeded: str

    def sizes(self) -> str:
        sized = {name: len(text) for name, text in msgspec.structs.asdict(self).items()}
        return ", ".join(
            f"{name} {sized[name]}" for name in ("request", "answer", "payload", "committed", "dispatching")
        )


class Bench(msgspec.Struct, frozen=True):
    """``latency_ms``: the mean time of one decision's three transactions. ``per_s`` leaves out the time to connect."""

    decisions: int
    per_s: float
    latency_ms: float


class Floor:
    """pgbench against the copies. Clients that share nothing but the disk: ``logs="each"``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.sample = msgspec.json.decode(world.sql(SAMPLE), type=Sample)
        copies = "".join(f"CREATE TABLE floor.{t} (LIKE public.{t} INCLUDING ALL);\n" for t in TABLES)
        world.sql(CLONE + copies)

    def run(self, clients: int, seconds: float, logs: Logs) -> Bench:
        self._world.sql(f"{EMPTY}; {OPEN_LOGS}")
        said = self._bench(NUMBERS + TENANT[logs] + ADMIT + COMMIT + SETTLE, clients, seconds)
        return Bench(int(_figure(PROCESSED, said)), _figure(RATE, said), _figure(LATENCY, said))

    def one_commit_ms(self, seconds: float) -> float:
        """The mean time of the commit transaction alone, when one client makes all three."""
        self._world.sql(f"{EMPTY}; {OPEN_LOGS}")
        said = self._bench(NUMBERS + TENANT["one"] + ADMIT + COMMIT + SETTLE, 1, seconds, "-r")
        steps = [(float(ms), text) for ms, text in STATEMENT.findall(said)]
        begins = [at for at, (_, text) in enumerate(steps) if text.startswith("BEGIN")]
        return sum(ms for ms, _ in steps[begins[1] : begins[2]])

    def _bench(self, script: str, clients: int, seconds: float, *options: str) -> str:
        """What pgbench reports."""
        path = self._world.folder / SCRIPT_NAME
        path.write_text(script)
        url = urlsplit(self._world.postgres.url)
        variables = [f"-D{name}={text}" for name, text in msgspec.structs.asdict(self.sample).items()]
        command = [
            str(self._world.postgres.bin_dir / "pgbench"),
            *("-n", "-M", "prepared", "-f", str(path), "-c", str(clients), "-j", str(min(clients, 2))),
            *("-T", str(max(1, round(seconds))), "-Dn=0", *variables, *options),
            *("-h", "127.0.0.1", "-p", str(url.port), "-U", str(url.username), url.path[1:]),
        ]
        result = subprocess.run(
            command, env={**os.environ, "PGPASSWORD": url.password or ""}, capture_output=True, text=True
        )
        if result.returncode or _figure(FAILED, result.stdout) != 0:
            raise FloorFailed(f"pgbench: {result.stderr[-2000:]}{result.stdout[-1000:]}")
        return result.stdout


def _figure(pattern: re.Pattern[str], said: str) -> float:
    found = pattern.search(said)
    if found is None:
        raise FloorFailed(f"pgbench did not report {pattern.pattern}: {said[-1000:]}")
    return float(found[1])
