"""Upgrades of a live database: NNNN_name.sql in this folder, applied in order by `coordinator.store.migrate`.

A file is one transaction, and its result is tested equal to schema.sql, which changes in the same commit. A file
whose first line is `-- no-transaction` (for CREATE INDEX CONCURRENTLY) runs statement by statement, separated by
lines that say `-- then`; it must bear being run again after a failure halfway, so it begins with
DROP INDEX CONCURRENTLY IF EXISTS. A released file is never edited.
"""
