"""Why a server of our own cannot be had.

EmbeddedPostgresError   the message says what to do about it
└─ DataFolderInUse      another live process has the data folder
"""

from __future__ import annotations

from pathlib import Path

from coordinator.errors import CoordinatorError


class EmbeddedPostgresError(CoordinatorError):
    """The server cannot be had; the message says what to do about it."""

    code = "embedded-postgres"


class DataFolderInUse(EmbeddedPostgresError):
    """Another live process uses the data folder. `pid` is that process, 0 when unknown."""

    code = "data-folder-in-use"

    def __init__(self, folder: Path, pid: int, what: str) -> None:
        super().__init__(
            f"{folder} is in use by {what} (pid {pid or 'unknown'}). "
            "Stop that process, or choose another data folder."
        )
        self.pid = pid
