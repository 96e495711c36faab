"""PgBouncer in transaction mode in front of a server of ours, where the program is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

from coordinator.embedded.address import free_port, port_is_free
from tests.support.postgres import data_folder
from tests.support.waiting import eventually_now

PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
"""It refuses to run as root."""


@contextmanager
def pgbouncer(url: str, *, pool_size: int = 20) -> Iterator[str]:
    """The URL that reaches the database of `url` through a transaction-mode pooler."""
    server = urlsplit(url)
    port = free_port()
    with data_folder() as folder:
        folder.chmod(0o755)
        (folder / "users").write_text(f'"{server.username}" "{server.password}"\n')
        (folder / "ini").write_text(
            f"[databases]\n* = host={server.hostname} port={server.port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = plain\n"
            f"auth_file = {folder / 'users'}\npool_mode = transaction\ndefault_pool_size = {pool_size}\n"
            "max_client_conn = 500\nignore_startup_parameters = extra_float_digits\n"
        )
        command = [*(NOBODY if os.geteuid() == 0 else ()), str(PROGRAM), "-q", str(folder / "ini")]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                eventually_now(
                    lambda: process.poll() is None and not port_is_free(port), what="pgbouncer listens"
                )
                yield urlunsplit(
                    server._replace(netloc=f"{server.username}:{server.password}@127.0.0.1:{port}")
                )
            finally:
                process.kill()
