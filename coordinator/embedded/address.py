"""Where a server of our own listens: 127.0.0.1, on a port that stays the same once clients know it."""

from __future__ import annotations

import secrets
import socket
from typing import Final

from coordinator.embedded.errors import EmbeddedPostgresError

PORTS: Final = range(15_000, 32_000)
"""Below the outgoing ports, where a client that reconnects to a crashed server could reach itself."""


def free_port() -> int:
    """A port that nobody listens on at this moment; somebody may take it before we do."""
    for _ in range(100):
        port = PORTS.start + secrets.randbelow(len(PORTS))
        if port_is_free(port):
            return port
    raise EmbeddedPostgresError(f"no free port between {PORTS.start} and {PORTS.stop}")


def port_is_free(port: int) -> bool:
    """Connections in TIME_WAIT don't count: PostgreSQL binds over them, too."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def url(role: str, password: str, port: int, database: str) -> str:
    return f"postgresql://{role}:{password}@127.0.0.1:{port}/{database}"
