"""A process of its own that owns an embedded server: prints `PID URL` when it runs, and stops it when its input ends."""

from __future__ import annotations

import sys
from pathlib import Path

from coordinator.embedded import EmbeddedPostgresError, embedded_postgres

if __name__ == "__main__":
    try:
        with embedded_postgres(Path(sys.argv[1])) as server:
            print(server.pid, server.url, flush=True)
            sys.stdin.read()
    except EmbeddedPostgresError as error:
        sys.exit(str(error))
