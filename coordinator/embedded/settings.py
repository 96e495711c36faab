"""How a server of our own is set up: for one service on one machine, reachable on loopback only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

NO_SETTINGS: Final[Mapping[str, str]] = MappingProxyType({})

BASE_SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "max_connections": "200",
        "shared_buffers": "128MB",
        "max_wal_size": "2GB",
        "wal_compression": "on",
        "password_encryption": "scram-sha-256",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "log_checkpoints": "off",
        "log_line_prefix": "%m [%p] ",
    }
)

SPEED_OVER_DURABILITY: Final[Mapping[str, str]] = MappingProxyType(
    {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
)
"""For tests alone: a crash of the machine may lose or spoil anything."""
