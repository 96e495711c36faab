"""How fast the service is, as a ratio to the floor, in one command on one machine:

    python -m loadtests.run                                       all of it, about eight minutes
    python -m loadtests.run --seconds 2 --clients 64 --only closed   a quick look
    python -m loadtests.run --inproc                              the engine and its storage without HTTP, too
    python -m loadtests.run --json figures.json                   the same figures for a program

Processes: PostgreSQL (embedded, fsync on), the demo providers, the server (one process unless the row says otherwise), and the
load driver, which only sends, waits and measures. Keep the machine idle otherwise, and give --data a folder on the disk that you
mean to measure: on a tmpfs, fsync costs nothing (the first lines print what a sync costs there).

The floor is what any service on this PostgreSQL would have to pay: pgbench makes the same durable writes, one decision after the
other in three transactions (admit, commit, settle), prepared, with the bytes of real rows of this run, and does nothing else. It
runs on copies of the tables without row-level security or foreign keys, which is in its favour, in two forms:

    floor, one log        all clients append to one tenant's receipt log, as the service's callers do
    floor, log each       every client has a tenant and a log of its own, so no client waits for another's lock

It runs before and after the cases of its number of clients. `x floor` is decisions/s over the mean of `floor, log each` at the
same number of clients. Above 1.0 the service is faster than the same writes one by one: calls that arrive while a transaction is
in flight share the next one (group commit). Figures of two machines compare by this column alone.

How to read the table:

    closed          N clients, each asks again as soon as it was answered
    open            arrivals at a fixed rate, half of what the closed loop reached; latency counts from when a request was due,
                    not from when it could be sent, so a stalled server is not let off (no coordinated omission)
    hot             all clients change one record
    2 processes     two server processes behind one socket
    in process      `Service.decide` called directly, sources and the sink in memory: no HTTP anywhere, driver in the same process
    p50 p95 p99     milliseconds from request to answer of decisions that were committed; for the floor at one client, the mean
                    of the three transactions together
    tx              transactions per decision, from the server's own counter: admit + start + commit + settle
    xid             writing transactions per decision as PostgreSQL counted them (transaction ids used; exact at once, where
                    pg_stat_database lags by seconds)
    WAL kB          write-ahead log per decision
    server .. driver CPU ms per decision, user and system, of the server, the providers, PostgreSQL with all its backends, the
                    driver
    errors          answers other than 201
    left            effects committed but not yet settled when the last answer came: work that the rate does not include

Each case asks for distinct records and distinct facts, so that no reading is shared. At the end the run compares what was
acknowledged with the database and with the providers' ledger: every effect once.
"""
