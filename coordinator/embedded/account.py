"""Which user a server runs as, expressed as the command words that go before it.

`setpriv --pdeathsig` makes the kernel send SIGINT when the parent dies. Without util-linux's setpriv (on
macOS) a server whose owner was killed stays, and its folder is refused until somebody stops it. Root needs
`unshare` or `setpriv`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from coordinator.embedded.errors import EmbeddedPostgresError

NOBODY: Final = 65534


def run_as_owner(cluster_dir: Path) -> list[str]:
    """For an existing cluster: its owner, and never root itself."""
    owner = cluster_dir.stat()
    if os.geteuid() not in (0, owner.st_uid):
        raise EmbeddedPostgresError(
            f"{cluster_dir} belongs to user {owner.st_uid}, and this is user {os.geteuid()}. "
            "Choose another data folder."
        )
    if os.geteuid() != 0:
        return _die_with_parent()
    return _in_namespace() if owner.st_uid == 0 else _as_user(owner.st_uid, owner.st_gid)


def choose_owner(fresh: Path, bin_dir: Path) -> list[str]:
    """For a cluster about to be made in `fresh`; leaves that folder owned accordingly."""
    if os.geteuid() != 0:
        return _die_with_parent()
    probe = ["test", "-w", str(fresh), "-a", "-x", str(bin_dir / "postgres")]
    if _works([*_in_namespace(), *probe]):
        return _in_namespace()
    fresh.parent.chmod(0o711)  # nobody must be able to pass through; the files in it have modes of their own
    os.chown(fresh, NOBODY, NOBODY)
    if _works([*_as_user(NOBODY, NOBODY), *probe]):
        return _as_user(NOBODY, NOBODY)
    raise EmbeddedPostgresError(
        "PostgreSQL refuses to run as root, and neither a user namespace (unshare) nor user nobody (setpriv) "
        f"can use both {fresh.parent} and {bin_dir}. Run this as an ordinary user, move both out of folders "
        "that only their owner may enter, or set DATABASE_URL to use a server that runs."
    )


def _die_with_parent() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "INT"] if setpriv else []


def _in_namespace() -> list[str]:
    unshare = shutil.which("unshare") or "unshare"
    return [unshare, "--user", f"--map-user={NOBODY}", f"--map-group={NOBODY}", *_die_with_parent()]


def _as_user(uid: int, gid: int) -> list[str]:
    setpriv = shutil.which("setpriv") or "setpriv"
    return [setpriv, f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--pdeathsig", "INT"]


def _works(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, cwd="/").returncode == 0
    except FileNotFoundError:
        return False
