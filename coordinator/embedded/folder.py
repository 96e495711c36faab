"""The data folder: who holds it, the passwords in it, and what the server there says about itself.

The flock on DATA/lock is held by a live owner and by nobody else: the kernel drops it with the process. A
server without an owner is one whose owner was just killed and that is still shutting down; a new owner
waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from coordinator.embedded.errors import DataFolderInUse, EmbeddedPostgresError

OWNER_ROLE: Final = "coordinator"
SUPERUSER: Final = "postgres"
ORPHAN_TIMEOUT_S: Final = 20.0
"""How long a server whose owner was killed may take to shut down before its folder is refused."""
ORPHAN_NOTICE_S: Final = 5.0
"""How long such a server may take to begin its shutdown; one that does not was started by somebody else."""
POLL_S: Final = 0.005


def take_folder(data_dir: Path) -> int:
    """Makes the folder if need be and locks it; closing the returned descriptor gives it up."""
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 32, 0).decode().strip()
        os.close(lock)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise DataFolderInUse(data_dir, int(holder or 0), "another coordinator") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def load_or_make_credentials(data_dir: Path) -> Mapping[str, str]:
    """Passwords by role. Made once, before the cluster, and renamed into place whole."""
    path = data_dir / "credentials.json"
    if not path.exists():
        if (data_dir / "cluster").exists():
            raise EmbeddedPostgresError(
                f"{path} is gone, and with it the passwords of the cluster beside it."
            )
        partial = path.with_suffix(".new")
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({role: secrets.token_urlsafe(24) for role in (SUPERUSER, OWNER_ROLE)}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        sync_folder(data_dir)
    credentials: dict[str, str] = json.loads(path.read_text())
    return credentials


def sync_folder(folder: Path) -> None:
    """Makes renames inside the folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Postmaster:
    """What a server says about itself in `postmaster.pid`: line 1 its pid, 4 its port, 8 its status."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.pid = int(lines[0])
        self.port = int(lines[3]) if len(lines) > 3 and lines[3] else 0
        self.status = lines[7].strip() if len(lines) > 7 else ""


def read_postmaster(cluster_dir: Path) -> Postmaster | None:
    """None when no server is there, or when it has not yet written who it is."""
    with contextlib.suppress(FileNotFoundError):
        lines = (cluster_dir / "postmaster.pid").read_text().splitlines()
        return Postmaster(lines) if lines and lines[0].strip().isdigit() else None
    return None


def wait_for_orphan(cluster_dir: Path) -> None:
    """Lets a server whose owner was killed finish its shutdown; refuses one that does not shut down."""
    started = time.monotonic()
    while (state := read_postmaster(cluster_dir)) is not None and serves(state.pid, cluster_dir):
        patience = ORPHAN_TIMEOUT_S if state.status == "stopping" else ORPHAN_NOTICE_S
        if time.monotonic() - started > patience:
            raise DataFolderInUse(cluster_dir, state.pid, "a PostgreSQL server that was not started here")
        time.sleep(POLL_S)


def serves(pid: int, cluster_dir: Path) -> bool:
    """Whether `pid` lives and is the server of this cluster, not a later process with the same number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/cwd").samefile(cluster_dir)
    except FileNotFoundError:
        return not Path("/proc/self").exists()  # no /proc on this system: believe postmaster.pid
    except PermissionError:
        return True
