-- The whole current schema of the decision coordinator. PostgreSQL 15 to 18.
--
-- Every key begins with tenant_id, and every transaction touches one tenant: row-level security enforces it (FORCEd, for the role
-- coordinator_app that every transaction assumes), and a distributed PostgreSQL can place a tenant's rows together.
--
-- Rows on the hot path carry no foreign key to their tenant: each insert would lock the tenant's one row.
-- json columns hold the exact bytes that were digested, answered or sent; jsonb would rewrite them.
-- All times are clock_timestamp() of this database; no other clock decides a lease or an order.

-- Roles ----------------------------------------------------------------------------------------------------------------------
-- coordinator_app       what every tenant transaction runs as (SET LOCAL ROLE); sees only the tenant named in coordinator.tenant
-- coordinator_dispatch  sees of all tenants only which of them have work that nobody holds
-- The login that migrates becomes a member of both. Where another login made the roles, that one has to grant them.
DO $$
DECLARE
    wanted text;
BEGIN
    FOREACH wanted IN ARRAY ARRAY['coordinator_app', 'coordinator_dispatch'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = wanted) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', wanted);
        END IF;
        BEGIN
            EXECUTE format('GRANT %I TO %I', wanted, current_user);
        EXCEPTION WHEN insufficient_privilege THEN
            IF NOT pg_has_role(current_user, wanted, 'MEMBER') THEN
                RAISE EXCEPTION 'the role % exists and % is not a member of it', wanted, current_user
                    USING HINT = format('as its creator or a superuser: GRANT %I TO %I', wanted, current_user);
            END IF;
        END;
    END LOOP;
END $$;

-- Tenants and their keys -----------------------------------------------------------------------------------------------------
CREATE TABLE tenants (
    tenant_id   uuid PRIMARY KEY,
    name        text NOT NULL UNIQUE CHECK (name <> ''),
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- An API key: only the SHA-256 of the secret is kept. The key's text names its tenant, so that it is looked up inside it.
CREATE TABLE keys (
    tenant_id   uuid NOT NULL REFERENCES tenants,
    id          uuid NOT NULL,
    hash        bytea NOT NULL CHECK (length(hash) = 32),
    name        text NOT NULL,
    scopes      text[] NOT NULL CHECK (scopes <@ ARRAY['decide', 'review', 'operate', 'work', 'audit', 'admin']),
    classes     text[],       -- the classes it may ask for; null: all
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    revoked_at  timestamptz,
    PRIMARY KEY (tenant_id, id),
    UNIQUE (tenant_id, hash)
);

-- Records --------------------------------------------------------------------------------------------------------------------
-- Version 0 is a record that does not exist yet: the row is only there so that it can be locked.
CREATE TABLE records (
    tenant_id   uuid NOT NULL,
    kind        text NOT NULL,
    id          text NOT NULL,
    version     bigint NOT NULL CHECK (version >= 0),
    data        json,
    updated_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant_id, kind, id),
    CHECK ((version = 0) = (data IS NULL))
);

-- Every version that was ever committed, with the decision or the key (an explicit PUT) that made it: exactly one of the two.
CREATE TABLE record_versions (
    tenant_id   uuid NOT NULL,
    kind        text NOT NULL,
    id          text NOT NULL,
    version     bigint NOT NULL CHECK (version >= 1),
    data        json NOT NULL,
    decision_id uuid,
    key_id      uuid,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant_id, kind, id, version),
    FOREIGN KEY (tenant_id, kind, id) REFERENCES records,
    CHECK ((decision_id IS NULL) <> (key_id IS NULL))
);

-- Decisions ------------------------------------------------------------------------------------------------------------------
-- A queued decision is held by nobody; any process with a free slot claims it. A running one is held under a lease by one process.
-- Each claim raises fencing_token, and every write of a holder names its token. A resting decision has no lease, and its answer
-- never changes; one that is in review is held while an approval of it is carried out.
CREATE TABLE decisions (
    tenant_id         uuid NOT NULL,
    id                uuid NOT NULL,
    idempotency_key   text NOT NULL CHECK (idempotency_key ~ '^[!-~]{1,255}$'),
    fingerprint       bytea NOT NULL CHECK (length(fingerprint) = 32),
    type              text NOT NULL,
    class             text NOT NULL,
    status            text NOT NULL CHECK (status IN ('queued', 'running', 'committed', 'declined', 'in_review', 'unresolved',
                                                      'conflicted', 'expired', 'cancelled', 'failed')),
    request           json NOT NULL,
    record_kind       text,
    record_id         text,
    requested_by      uuid NOT NULL,
    session           text CHECK (session ~ '^[!-~]{1,255}$'),    -- the caller's own name for what it may cancel together
    traceparent       text NOT NULL,
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    deadline_at       timestamptz NOT NULL,
    queued_at         timestamptz NOT NULL DEFAULT clock_timestamp(),    -- its place in the queue; kept when it is queued again
    estimated_ms      int,        -- when it was expected to start, if it had to wait
    requeues          int NOT NULL DEFAULT 0,
    lease_owner       uuid,
    lease_expires_at  timestamptz,
    fencing_token     bigint NOT NULL DEFAULT 1,
    answer            json,       -- what POST answers, byte for byte, once the decision rests
    answer_status     smallint,
    view              json,       -- the decision itself, where that is not the answer (a refusal)
    finished_at       timestamptz,
    review            json,         -- while in review: what an approval would commit (engine/reviewing.py)
    review_expires_at timestamptz,
    reviewed          json,         -- the latest verdict that was begun: whose, which, on which etag
    PRIMARY KEY (tenant_id, id),
    UNIQUE (tenant_id, idempotency_key),
    CHECK (status = 'in_review' OR (status = 'running') = (lease_owner IS NOT NULL)),
    CHECK ((lease_owner IS NULL) = (lease_expires_at IS NULL)),
    CHECK ((status IN ('queued', 'running')) = (answer IS NULL)),
    CHECK ((answer IS NULL) = (answer_status IS NULL)),
    CHECK ((answer IS NULL) = (finished_at IS NULL)),
    CHECK ((status = 'in_review') = (review IS NOT NULL)),
    CHECK ((status = 'in_review') = (review_expires_at IS NOT NULL))
);
CREATE INDEX decisions_leased ON decisions (tenant_id, lease_expires_at) WHERE status = 'running';
CREATE INDEX decisions_queued ON decisions (tenant_id, class, queued_at, id) WHERE status = 'queued';
CREATE INDEX decisions_overdue ON decisions (tenant_id, deadline_at) WHERE status = 'queued';
CREATE INDEX decisions_of_session ON decisions (tenant_id, session) WHERE status IN ('queued', 'running') AND session IS NOT NULL;
CREATE INDEX decisions_by_record ON decisions (tenant_id, record_kind, record_id, id) WHERE record_kind IS NOT NULL;
CREATE INDEX decisions_by_status ON decisions (tenant_id, status, id);
CREATE INDEX decisions_in_review ON decisions (tenant_id, review_expires_at) WHERE status = 'in_review';

-- How many decisions of a class are queued; changed in the transaction that changes their status, so that it is bounded exactly.
CREATE TABLE queues (
    tenant_id   uuid NOT NULL,
    class       text NOT NULL,
    depth       int NOT NULL DEFAULT 0 CHECK (depth >= 0),
    PRIMARY KEY (tenant_id, class)
);
CREATE INDEX queues_waiting ON queues (tenant_id, class) WHERE depth > 0;

-- What each process says of itself every second, in rows of no tenant (uuid 0): see engine/presence.py.
CREATE TABLE processes (
    tenant_id   uuid NOT NULL,
    id          uuid NOT NULL,
    state       json NOT NULL,
    expires_at  timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, id)
);

-- Operations -----------------------------------------------------------------------------------------------------------------
-- A committed effect. It is born claimed: the commit that creates it is the claim that must be durable before the provider is
-- called. due_at: when a ready operation may be sent, or an uncertain one asked about; null if nothing is planned.
CREATE TABLE operations (
    tenant_id         uuid NOT NULL,
    id                uuid NOT NULL,
    decision_id       uuid NOT NULL,
    decision_type     text NOT NULL,
    effect            text NOT NULL,
    ordinal           int NOT NULL,
    key               text NOT NULL,
    payload           json NOT NULL,
    payload_hash      text NOT NULL,
    guarantee         json NOT NULL,
    state             text NOT NULL CHECK (state IN ('ready', 'dispatching', 'succeeded', 'failed', 'uncertain', 'compensating',
                                                     'compensated', 'cancelled')),
    reason            text,
    reference         text,
    sends             int NOT NULL DEFAULT 0 CHECK (sends >= 0),
    lookups           int NOT NULL DEFAULT 0 CHECK (lookups >= 0),
    linked            boolean NOT NULL,    -- the decision has other operations, or it can be compensated: see core/saga.py
    after             int[] NOT NULL,      -- ordinals that have to succeed first
    on_failure        text NOT NULL CHECK (on_failure IN ('keep', 'compensate')),
    compensation      json,                -- the operation that would undo it, as it would be inserted
    compensates       int,                 -- the ordinal of what this one undoes
    cancel_requested  boolean NOT NULL DEFAULT false,
    paid              boolean NOT NULL DEFAULT false,    -- its decision holds reservations for its operations
    in_doubt          boolean NOT NULL DEFAULT false,    -- some send of it may have been acted upon, as far as we know
    traceparent       text NOT NULL,
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_sent_at      timestamptz,
    due_at            timestamptz,
    lease_owner       uuid,
    lease_expires_at  timestamptz,
    fencing_token     bigint NOT NULL DEFAULT 1,
    settled_at        timestamptz,
    PRIMARY KEY (tenant_id, id),
    UNIQUE (tenant_id, key),
    UNIQUE (tenant_id, decision_id, ordinal),
    FOREIGN KEY (tenant_id, decision_id) REFERENCES decisions,
    CHECK ((lease_owner IS NULL) = (lease_expires_at IS NULL)),
    CHECK (state <> 'dispatching' OR lease_owner IS NOT NULL),
    CHECK (state NOT IN ('ready', 'succeeded', 'failed', 'compensated', 'cancelled') OR lease_owner IS NULL),
    CHECK (state <> 'succeeded' OR reference IS NOT NULL),
    CHECK (state NOT IN ('failed', 'uncertain') OR reason IS NOT NULL),
    CHECK ((state IN ('succeeded', 'failed', 'compensated', 'cancelled')) = (settled_at IS NOT NULL))
);
CREATE INDEX operations_leased ON operations (tenant_id, lease_expires_at) WHERE lease_owner IS NOT NULL;
CREATE INDEX operations_due ON operations (tenant_id, due_at) WHERE state IN ('ready', 'uncertain');
CREATE INDEX operations_by_state ON operations (tenant_id, state, id);

-- Events that providers sent us of themselves, so that each counts once.
CREATE TABLE provider_events (
    tenant_id   uuid NOT NULL,
    effect      text NOT NULL,
    event_id    text NOT NULL CHECK (length(event_id) BETWEEN 1 AND 255),
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant_id, effect, event_id)
);

-- How many sends were repeats, per minute: a provider's outage must not become a storm of retries.
CREATE TABLE retry_minutes (
    tenant_id   uuid NOT NULL,
    minute      timestamptz NOT NULL,
    used        int NOT NULL CHECK (used > 0),
    PRIMARY KEY (tenant_id, minute)
);

-- Workers and tasks ----------------------------------------------------------------------------------------------------------
-- A worker is a remote process that claims evidence tasks, at most max_tasks at once. How many it has in progress, and whether it
-- is idle, busy or offline, is derived from its tasks and its heartbeat, never stored.
CREATE TABLE workers (
    tenant_id      uuid NOT NULL,
    id             uuid NOT NULL,
    name           text NOT NULL CHECK (name ~ '^[!-~]{1,63}$'),
    capabilities   text[] NOT NULL,
    max_tasks      int NOT NULL CHECK (max_tasks BETWEEN 1 AND 20),
    incarnation    text,           -- which process has this name now, in its own words; null if it did not say
    registered_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    heartbeat_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    drain_until    timestamptz,    -- it gets nothing new, and what it has left at this time is handed back
    PRIMARY KEY (tenant_id, id),
    UNIQUE (tenant_id, name)
);

-- One reading that a worker makes. Each claim raises fencing_token, and every report of a worker names the token it was given.
CREATE TABLE tasks (
    tenant_id         uuid NOT NULL,
    id                uuid NOT NULL,
    decision_id       uuid NOT NULL,
    decision_token    bigint NOT NULL,     -- of the decision's holder that waits for it
    evidence          text NOT NULL,
    source            text NOT NULL,
    capability        text NOT NULL,
    pinned            text,                -- the name of the only worker that may have it
    may_fall_back     boolean NOT NULL,    -- any capable worker may have it, too, if the pinned one cannot
    request           json NOT NULL,
    traceparent       text NOT NULL,
    state             text NOT NULL CHECK (state IN ('waiting', 'in_progress', 'completed', 'failed', 'expired', 'cancelled')),
    worker_id         uuid,
    fencing_token     bigint NOT NULL DEFAULT 0,
    attempts          int NOT NULL DEFAULT 0,
    max_attempts      int NOT NULL CHECK (max_attempts >= 1),
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    deadline_at       timestamptz NOT NULL,
    lease_expires_at  timestamptz,
    heartbeat_at      timestamptz,         -- when its worker was last heard of because of it
    awaited_at        timestamptz NOT NULL DEFAULT clock_timestamp(),    -- when a process last said that it waits for it
    ended_at          timestamptz,
    answer            json,                -- what the worker found, or why it could not
    PRIMARY KEY (tenant_id, id),
    FOREIGN KEY (tenant_id, decision_id) REFERENCES decisions,
    FOREIGN KEY (tenant_id, worker_id) REFERENCES workers,
    CHECK ((state = 'in_progress') = (lease_expires_at IS NOT NULL)),
    CHECK (state NOT IN ('in_progress', 'completed') OR worker_id IS NOT NULL),
    CHECK (state <> 'waiting' OR worker_id IS NULL),
    CHECK ((state IN ('completed', 'failed')) = (answer IS NOT NULL)),
    CHECK ((state IN ('waiting', 'in_progress')) = (ended_at IS NULL)),
    CHECK (attempts <= max_attempts)
);
CREATE INDEX tasks_waiting ON tasks (tenant_id, capability, created_at) WHERE state = 'waiting';
CREATE INDEX tasks_in_progress ON tasks (tenant_id, worker_id) WHERE state = 'in_progress';
CREATE INDEX tasks_open ON tasks (tenant_id, capability) WHERE state IN ('waiting', 'in_progress');
CREATE INDEX tasks_of_decision ON tasks (tenant_id, decision_id);

-- What a worker found that was superseded by then: kept once for each token as a receipt, and here until its cost is accounted for.
CREATE TABLE late_answers (
    tenant_id   uuid NOT NULL,
    task_id     uuid NOT NULL,
    token       bigint NOT NULL,
    cost_minor  bigint CHECK (cost_minor >= 0),
    currency    text,
    billed_at   timestamptz,
    PRIMARY KEY (tenant_id, task_id, token),
    FOREIGN KEY (tenant_id, task_id) REFERENCES tasks,
    CHECK ((cost_minor IS NULL) = (currency IS NULL)),
    CHECK (cost_minor IS NOT NULL OR billed_at IS NOT NULL)
);
CREATE INDEX late_answers_unbilled ON late_answers (tenant_id) WHERE billed_at IS NULL;

-- Pools ----------------------------------------------------------------------------------------------------------------------
-- What a provider permits, over all processes of the service: no tenant's, so the rows belong to the nil tenant. moves rises whenever a
-- process writes its share, claims whenever somebody takes of the rates (what was granted of late, see core/rate.py): who has computed
-- with an older number writes nothing.
CREATE TABLE pools (
    tenant_id         uuid NOT NULL,
    provider          text NOT NULL,
    concurrency       int CHECK (concurrency > 0),
    requests_per_min  int CHECK (requests_per_min > 0),
    units_per_min     bigint CHECK (units_per_min > 0),
    rates             json NOT NULL DEFAULT '{}',
    claims            bigint NOT NULL DEFAULT 0,
    moves             bigint NOT NULL DEFAULT 0,
    declared_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant_id, provider)
);

-- The slots that each process holds: together, those whose frees_at has not passed never exceed the pool's concurrency. A process uses
-- them until expires_at, and another may have them from frees_at on, when every call that was begun before has ended. busy, waiting
-- (waited_ms: the first of them) and wanted are what the process said last.
CREATE TABLE pool_shares (
    tenant_id      uuid NOT NULL,
    provider       text NOT NULL,
    process_id     uuid NOT NULL,
    slots          int NOT NULL CHECK (slots >= 0),
    busy           int NOT NULL CHECK (busy >= 0),
    waiting        int NOT NULL CHECK (waiting >= 0),
    wanted         int NOT NULL CHECK (wanted >= 0),
    waited_ms      int NOT NULL CHECK (waited_ms >= 0),
    expires_at     timestamptz NOT NULL,
    frees_at       timestamptz NOT NULL CHECK (frees_at >= expires_at),
    PRIMARY KEY (tenant_id, provider, process_id),
    FOREIGN KEY (tenant_id, provider) REFERENCES pools
);

-- Budgets --------------------------------------------------------------------------------------------------------------------
-- Money is reserved before work, in the admission's own transaction, and settled in the commit's: see core/budget.py. Whoever
-- changes what a period holds has locked its row before any decision, in the order of (name, starts_at).

-- The instant at which a local day begins. Where clocks are set back over a midnight, the first of the two counts; where midnight
-- is left out, the day begins with what comes instead.
CREATE FUNCTION budget_midnight(local timestamp, timezone text) RETURNS timestamptz LANGUAGE sql STABLE
RETURN CASE WHEN (local AT TIME ZONE timezone - interval '1 hour') AT TIME ZONE timezone = local
            THEN local AT TIME ZONE timezone - interval '1 hour'
            ELSE local AT TIME ZONE timezone END;

-- The day or month of an IANA zone in which an instant lies, as [starts_at, ends_at): a day may have 23 or 25 hours.
CREATE FUNCTION budget_period(period text, timezone text, instant timestamptz, OUT starts_at timestamptz, OUT ends_at timestamptz)
LANGUAGE sql STABLE
RETURN CASE period
    WHEN 'total' THEN ROW('-infinity'::timestamptz, 'infinity'::timestamptz)
    ELSE ROW(budget_midnight(date_trunc(period, instant AT TIME ZONE timezone), timezone),
             budget_midnight(date_trunc(period, instant AT TIME ZONE timezone) + ('1 ' || period)::interval, timezone))
END;

-- provider: only that provider's readings and effects draw on it.
CREATE TABLE budgets (
    tenant_id      uuid NOT NULL,
    name           text NOT NULL CHECK (name ~ '^[a-z][a-z0-9-]{0,62}$'),
    ceiling_minor  bigint NOT NULL CHECK (ceiling_minor >= 0),
    currency       text NOT NULL CHECK (currency ~ '^[A-Z]{3}$'),
    period         text NOT NULL CHECK (period IN ('day', 'month', 'total')),
    timezone       text NOT NULL,
    provider       text,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant_id, name)
);

-- One row for each period in which something was reserved. What its reservations take, by their state; overage is the sum of the
-- rows in overages, and the only way beyond the ceiling.
CREATE TABLE budget_periods (
    tenant_id      uuid NOT NULL,
    name           text NOT NULL,
    starts_at      timestamptz NOT NULL,
    ends_at        timestamptz NOT NULL,
    ceiling_minor  bigint NOT NULL CHECK (ceiling_minor >= 0),
    held           bigint NOT NULL DEFAULT 0 CHECK (held >= 0),
    uncertain      bigint NOT NULL DEFAULT 0 CHECK (uncertain >= 0),
    settled        bigint NOT NULL DEFAULT 0 CHECK (settled >= 0),
    overage        bigint NOT NULL DEFAULT 0 CHECK (overage >= 0),
    PRIMARY KEY (tenant_id, name, starts_at),
    FOREIGN KEY (tenant_id, name) REFERENCES budgets,
    CHECK (starts_at < ends_at),
    CHECK (held + uncertain + settled <= ceiling_minor + overage)
) WITH (fillfactor = 50);

-- drawn_minor: what it takes of each period it draws on, in its state. token: the claim of the decision under which it was made.
-- expires_at: when nobody can still be working under it; null once an operation has it, which always ends. ask_at: when its
-- provider is asked next what it billed.
CREATE TABLE reservations (
    tenant_id      uuid NOT NULL,
    id             uuid NOT NULL,
    decision_id    uuid NOT NULL,
    operation_id   uuid,
    token          bigint NOT NULL,
    kind           text NOT NULL CHECK (kind IN ('evidence', 'effect')),
    item           text NOT NULL,
    provider       text NOT NULL,
    amount_minor   bigint NOT NULL CHECK (amount_minor >= 0),
    drawn_minor    bigint NOT NULL CHECK (drawn_minor >= 0),
    currency       text NOT NULL,
    state          text NOT NULL CHECK (state IN ('held', 'settled', 'released', 'uncertain')),
    reason         text,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at     timestamptz,
    ask_at         timestamptz,
    closed_at      timestamptz,
    PRIMARY KEY (tenant_id, id),
    CHECK ((state IN ('settled', 'released')) = (closed_at IS NOT NULL)),
    CHECK (state <> 'held' OR drawn_minor = amount_minor),
    CHECK (state <> 'uncertain' OR reason IS NOT NULL)
);
CREATE UNIQUE INDEX reservations_held_once ON reservations (tenant_id, decision_id, kind, item) WHERE state = 'held';
CREATE INDEX reservations_by_decision ON reservations (tenant_id, decision_id);
CREATE INDEX reservations_expiring ON reservations (tenant_id, expires_at) WHERE state = 'held' AND expires_at IS NOT NULL;
CREATE INDEX reservations_to_ask ON reservations (tenant_id, ask_at) WHERE state = 'uncertain' AND ask_at IS NOT NULL;

-- Which periods a reservation draws on.
CREATE TABLE draws (
    tenant_id       uuid NOT NULL,
    reservation_id  uuid NOT NULL,
    budget          text NOT NULL,
    starts_at       timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, reservation_id, budget)
);
CREATE INDEX draws_by_budget ON draws (tenant_id, budget, reservation_id);

-- Why a period may hold more than its ceiling: one row for each bill and budget, or for a ceiling that was lowered.
CREATE TABLE overages (
    tenant_id       uuid NOT NULL,
    id              uuid NOT NULL DEFAULT gen_random_uuid(),
    budget          text NOT NULL,
    starts_at       timestamptz NOT NULL,
    reservation_id  uuid,
    amount_minor    bigint NOT NULL CHECK (amount_minor > 0),
    cause           text NOT NULL CHECK (cause IN ('bigger-bill', 'late-bill', 'unreserved-bill', 'ceiling-lowered')),
    at              timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant_id, id),
    FOREIGN KEY (tenant_id, budget, starts_at) REFERENCES budget_periods,
    CHECK ((reservation_id IS NULL) = (cause = 'ceiling-lowered'))
);
CREATE INDEX overages_by_period ON overages (tenant_id, budget, starts_at);

-- Late bills by the provider's own name for them, so that each counts once.
CREATE TABLE bills (
    tenant_id       uuid NOT NULL,
    reservation_id  uuid NOT NULL,
    bill            text NOT NULL CHECK (length(bill) BETWEEN 1 AND 255),
    amount_minor    bigint NOT NULL CHECK (amount_minor > 0),
    at              timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant_id, reservation_id, bill),
    FOREIGN KEY (tenant_id, reservation_id) REFERENCES reservations
);

-- Named locks ----------------------------------------------------------------------------------------------------------------
-- One row per name that was ever wanted: its token must never fall, so the row stays. It is held while decision_id is set and that
-- decision runs; one that runs again has its locks still, unless others took them meanwhile. expires_at is past every legitimate
-- run's end.
-- wanted_by: who has been waiting in another process since wanted_since; it goes stale at wanted_until unless it asks again.
-- Names compare by code point, here as in Python: that is the global order in which they are taken.
CREATE TABLE locks (
    tenant_id       uuid NOT NULL,
    name            text COLLATE "C" NOT NULL CHECK (length(name) BETWEEN 1 AND 255),
    fencing_token   bigint NOT NULL DEFAULT 0,
    decision_id     uuid,
    decision_token  bigint,
    taken_at        timestamptz,
    expires_at      timestamptz,
    wanted_by       uuid,
    wanted_since    timestamptz,
    wanted_until    timestamptz,
    PRIMARY KEY (tenant_id, name),
    FOREIGN KEY (tenant_id, decision_id) REFERENCES decisions,
    CHECK (num_nulls(decision_id, decision_token, taken_at, expires_at) IN (0, 4)),
    CHECK (num_nulls(wanted_by, wanted_since, wanted_until) IN (0, 3))
);
CREATE INDEX locks_held ON locks (tenant_id, name) WHERE decision_id IS NOT NULL;

-- Receipts -------------------------------------------------------------------------------------------------------------------
-- One per state change, appended in the change's own transaction. The log's row hands out contiguous indices: it is locked last,
-- so the order of indices is the order of commits.
CREATE TABLE logs (
    tenant_id   uuid PRIMARY KEY REFERENCES tenants,
    size        bigint NOT NULL DEFAULT 0 CHECK (size >= 0)
);

CREATE TABLE receipts (
    tenant_id     uuid NOT NULL,
    index         bigint NOT NULL CHECK (index >= 0),
    at            timestamptz NOT NULL DEFAULT clock_timestamp(),
    kind          text NOT NULL,
    decision_id   uuid,
    operation_id  uuid,
    body          json NOT NULL,
    PRIMARY KEY (tenant_id, index)
);
CREATE INDEX receipts_by_decision ON receipts (tenant_id, decision_id, index) WHERE decision_id IS NOT NULL;
CREATE INDEX receipts_by_operation ON receipts (tenant_id, operation_id, index) WHERE operation_id IS NOT NULL;

-- Events ---------------------------------------------------------------------------------------------------------------------
-- What followers of a decision are told while it runs; see core/events.py for the numbers. Only of decisions that somebody
-- follows (decision_follows says so): in batches while it runs, and the rest with its commit.
CREATE TABLE decision_events (
    tenant_id    uuid NOT NULL,
    decision_id  uuid NOT NULL,
    number       bigint NOT NULL CHECK (number > 1),
    kind         text NOT NULL,
    data         json NOT NULL,
    PRIMARY KEY (tenant_id, decision_id, number),
    FOREIGN KEY (tenant_id, decision_id) REFERENCES decisions
);

CREATE TABLE decision_follows (
    tenant_id    uuid NOT NULL,
    decision_id  uuid NOT NULL,
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant_id, decision_id),
    FOREIGN KEY (tenant_id, decision_id) REFERENCES decisions
);

-- Progress that a worker reported to another process than the one that holds the decision, on its way to that one.
CREATE TABLE decision_notes (
    tenant_id    uuid NOT NULL,
    id           uuid NOT NULL,
    decision_id  uuid NOT NULL,
    evidence     text NOT NULL,
    lines        text[] NOT NULL,
    taken        boolean NOT NULL DEFAULT false,
    PRIMARY KEY (tenant_id, id),
    FOREIGN KEY (tenant_id, decision_id) REFERENCES decisions
);
CREATE INDEX decision_notes_on_their_way ON decision_notes (tenant_id, decision_id) WHERE NOT taken;

-- Which decision asked for which, and waits for its outcome.
CREATE TABLE decision_children (
    tenant_id  uuid NOT NULL,
    parent_id  uuid NOT NULL,
    child_id   uuid NOT NULL,
    PRIMARY KEY (tenant_id, parent_id, child_id),
    FOREIGN KEY (tenant_id, parent_id) REFERENCES decisions,
    FOREIGN KEY (tenant_id, child_id) REFERENCES decisions
);

-- Row-level security ---------------------------------------------------------------------------------------------------------
-- current_setting(..., true) is null when no tenant is set, and then no row is visible.
DO $$
DECLARE
    owned text;
BEGIN
    FOREACH owned IN ARRAY ARRAY[
        'tenants',
        'keys',
        'records',
        'record_versions',
        'decisions',
        'queues',
        'processes',
        'operations',
        'locks',
        'provider_events',
        'retry_minutes',
        'workers',
        'tasks',
        'late_answers',
        'decision_events',
        'decision_follows',
        'decision_notes',
        'decision_children',
        'pools',
        'pool_shares',
        'budgets',
        'budget_periods',
        'reservations',
        'draws',
        'overages',
        'bills',
        'logs',
        'receipts'
    ]
    LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', owned);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', owned);
        EXECUTE format(
            'CREATE POLICY own_tenant ON %I TO coordinator_app
             USING (tenant_id = (SELECT nullif(current_setting(''coordinator.tenant'', true), '''')::uuid))', owned);
    END LOOP;
END $$;

-- Nothing that happened is ever deleted, and receipts are never updated: the grants say so. Only the database's owner makes tenants.
GRANT SELECT ON tenants TO coordinator_app;
GRANT SELECT, INSERT, UPDATE ON keys, records, decisions, operations, logs TO coordinator_app;
GRANT SELECT, INSERT, UPDATE ON workers, tasks, late_answers TO coordinator_app;
GRANT SELECT, INSERT, UPDATE ON retry_minutes, queues TO coordinator_app;
GRANT SELECT, INSERT, UPDATE, DELETE ON processes TO coordinator_app;
GRANT SELECT, INSERT, UPDATE ON pools TO coordinator_app;
GRANT SELECT, INSERT, UPDATE, DELETE ON pool_shares TO coordinator_app;
GRANT SELECT, INSERT, UPDATE ON budgets, budget_periods, reservations TO coordinator_app;
GRANT SELECT, INSERT ON draws, overages, bills TO coordinator_app;
GRANT SELECT, INSERT, UPDATE ON locks TO coordinator_app;
GRANT SELECT, INSERT ON record_versions, provider_events, receipts TO coordinator_app;
GRANT SELECT, INSERT ON decision_events, decision_follows, decision_children TO coordinator_app;
GRANT SELECT, INSERT, UPDATE ON decision_notes TO coordinator_app;

CREATE POLICY which_tenants_have_work ON decisions FOR SELECT TO coordinator_dispatch USING (true);
CREATE POLICY which_tenants_have_work ON operations FOR SELECT TO coordinator_dispatch USING (true);
CREATE POLICY which_tenants_have_work ON tasks FOR SELECT TO coordinator_dispatch USING (true);
CREATE POLICY which_tenants_have_work ON late_answers FOR SELECT TO coordinator_dispatch USING (true);
GRANT SELECT (tenant_id, billed_at) ON late_answers TO coordinator_dispatch;
CREATE POLICY which_tenants_have_work ON queues FOR SELECT TO coordinator_dispatch USING (true);
GRANT SELECT (tenant_id, type, class, status, queued_at, deadline_at, lease_expires_at, review_expires_at) ON decisions
    TO coordinator_dispatch;
GRANT SELECT ON queues TO coordinator_dispatch;
GRANT SELECT (tenant_id, state, due_at, lease_owner, lease_expires_at) ON operations TO coordinator_dispatch;
GRANT SELECT (tenant_id, id, capability, pinned, state, lease_expires_at, deadline_at) ON tasks TO coordinator_dispatch;
CREATE POLICY which_tenants_have_work ON reservations FOR SELECT TO coordinator_dispatch USING (true);
GRANT SELECT (tenant_id, state, expires_at, ask_at) ON reservations TO coordinator_dispatch;
CREATE POLICY owner_makes_tenants ON tenants TO current_user USING (true);
CREATE POLICY owner_opens_logs ON logs TO current_user USING (true);
