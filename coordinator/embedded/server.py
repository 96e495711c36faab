"""One server process: started, watched, started again when it crashes, stopped.

The kernel ties a parent's death signal to the *thread* that started the child, not to the process. So each
server is started, watched and reaped by one daemon thread that ends only after the server has; `start()`
itself may be called from any short-lived worker thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from coordinator.embedded import address
from coordinator.embedded.account import run_as_owner
from coordinator.embedded.cluster import check_version, find_bin_dir, make_cluster
from coordinator.embedded.errors import EmbeddedPostgresError
from coordinator.embedded.folder import (
    OWNER_ROLE,
    POLL_S,
    SUPERUSER,
    load_or_make_credentials,
    read_postmaster,
    serves,
    take_folder,
    wait_for_orphan,
)
from coordinator.embedded.settings import BASE_SETTINGS, NO_SETTINGS, SPEED_OVER_DURABILITY

log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 60.0
"""From the spawn to "ready", crash recovery included; the same again for bringing back a crashed server."""
STOP_TIMEOUT_S: Final = 15.0
"""How long a fast shutdown (SIGINT) may take before an immediate one (SIGQUIT)."""
LOG_LIMIT_BYTES: Final = 16 * 1024 * 1024
TRANSIENT_START_FAULTS: Final = (
    "is still in use",  # the last backends of a killed server still hold its shared memory
    'lock file "postmaster.pid" already exists',  # the killed server has not been reaped yet
    "Address already in use",  # somebody took the free port first
)


class EmbeddedPostgres:
    """A server on 127.0.0.1, started by `start()` and stopped by `stop()`; both may be called again.

    `url` and `superuser_url` hold from the first `start()` on; they stay when the server starts again.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        durable: bool = True,
        port: int | None = None,
        settings: Mapping[str, str] = NO_SETTINGS,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.cluster_dir = self.data_dir / "cluster"
        self.log_path = self.data_dir / "postgres.log"
        self.bin_dir = find_bin_dir()
        self.port = port or 0
        self._port_is_ours_to_choose = port is None
        self._settings = {**BASE_SETTINGS, **({} if durable else SPEED_OVER_DURABILITY), **settings}
        self._durable = durable
        self._credentials: Mapping[str, str] = {}
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def url(self) -> str:
        """Of the database `coordinator`, as the role `coordinator`."""
        return self._url(OWNER_ROLE, OWNER_ROLE)

    @property
    def superuser_url(self) -> str:
        """Of the database `postgres`, as the superuser."""
        return self._url(SUPERUSER, SUPERUSER)

    @property
    def pid(self) -> int:
        """The server's main process. Changes when the server was started again."""
        if self._process is None:
            raise EmbeddedPostgresError("PostgreSQL has not been started")
        return self._process.pid

    def start(self) -> None:
        """Makes the cluster if there is none, and returns when the server accepts connections."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._lock = self._lock if self._lock is not None else take_folder(self.data_dir)
        try:
            self._credentials = load_or_make_credentials(self.data_dir)
            if not self.cluster_dir.exists():
                make_cluster(self.bin_dir, self.cluster_dir, self._credentials, durable=self._durable)
            check_version(self.bin_dir, self.cluster_dir)
            wait_for_orphan(self.cluster_dir)
            self._shorten_log()
            ready: Future[None] = Future()
            self._stopping.clear()
            self._thread = threading.Thread(
                target=self._own_server, args=(ready,), name="postgres-owner", daemon=True
            )
            self._thread.start()
            ready.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Fast shutdown: open transactions are rolled back, everything committed is on disk."""
        self._end_server(signal.SIGINT)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def kill(self) -> None:
        """SIGKILL, as a crash would. The folder stays ours and the server stays down until `start()`."""
        self._end_server(signal.SIGKILL)

    def create_database(self, name: str, *, template: str | None = None) -> str:
        """Creates a database that the role `coordinator` owns; returns its URL for that role."""
        copy = f' TEMPLATE "{template}"' if template else ""
        self.psql(f'CREATE DATABASE "{name}" OWNER {OWNER_ROLE}{copy}')
        return self._url(OWNER_ROLE, name)

    def drop_database(self, name: str) -> None:
        """Drops a database, ending its connections."""
        self.psql(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def psql(self, sql: str, *, database: str = SUPERUSER) -> str:
        """Runs SQL as the superuser and returns the rows, unaligned; raises with the server's message."""
        result = subprocess.run(
            [self.bin_dir / "psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", sql],
            env={
                **os.environ,
                "PGHOST": "127.0.0.1",
                "PGPORT": str(self.port),
                "PGUSER": SUPERUSER,
                "PGPASSWORD": self._credentials[SUPERUSER],
                "PGDATABASE": database,
            },
            capture_output=True,
            text=True,
        )
        if result.returncode:
            raise EmbeddedPostgresError(result.stderr.strip())
        return result.stdout.strip()

    def _url(self, role: str, database: str) -> str:
        return address.url(role, self._credentials[role], self.port, database)

    def _own_server(self, ready: Future[None]) -> None:
        """The life of the thread that the kernel takes for the server's parent."""
        try:
            self._spawn_until_ready()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in start()
            ready.set_exception(error)
            return
        self._port_is_ours_to_choose = False  # from now on clients know it
        ready.set_result(None)
        while True:
            code = self._process.wait() if self._process else 0
            if self._stopping.is_set():
                return
            log.warning(
                "PostgreSQL (pid %d) ended unexpectedly with code %d; starting it again", self.pid, code
            )
            try:
                self._spawn_until_ready()
            except (EmbeddedPostgresError, OSError):
                if not self._stopping.is_set():
                    log.exception("PostgreSQL could not be started again")
                return

    def _spawn_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._stopping.is_set():
            said_before = self.log_path.stat().st_size if self.log_path.exists() else 0
            self._process = self._spawn()
            if self._wait_ready(self._process, deadline):
                return
            said = self.log_path.read_bytes()[said_before:].decode(errors="replace").strip()
            transient = any(fault in said for fault in TRANSIENT_START_FAULTS)
            if not transient or time.monotonic() > deadline:
                raise EmbeddedPostgresError(f"PostgreSQL did not start. It said:\n{said or '(nothing)'}")
            self._stopping.wait(0.02)
        raise EmbeddedPostgresError("PostgreSQL was stopped while it started")

    def _spawn(self) -> subprocess.Popen[bytes]:
        if self._port_is_ours_to_choose and (self.port == 0 or not address.port_is_free(self.port)):
            self.port = address.free_port()
        settings = {**self._settings, "port": str(self.port)}
        arguments = [argument for name, value in settings.items() for argument in ("-c", f"{name}={value}")]
        server = [str(self.bin_dir / "postgres"), "-D", str(self.cluster_dir), *arguments]
        with self.log_path.open("ab") as server_log:
            return subprocess.Popen(
                [*run_as_owner(self.cluster_dir), *server],
                stdin=subprocess.DEVNULL,
                stdout=server_log,
                stderr=server_log,
                cwd="/",
                start_new_session=True,  # a terminal's Ctrl-C is for the owner, which still has work to do
            )

    def _shorten_log(self) -> None:
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_LIMIT_BYTES:
            self.log_path.unlink()

    def _wait_ready(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        while process.poll() is None:
            state = read_postmaster(self.cluster_dir)
            if state is not None and state.pid == process.pid and state.status == "ready":
                return True
            if time.monotonic() > deadline:
                process.send_signal(signal.SIGQUIT)
                process.wait()
                return False
            time.sleep(POLL_S)
        return False

    def _end_server(self, first: signal.Signals) -> None:
        self._stopping.set()
        steps = ((first, STOP_TIMEOUT_S), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0))
        for number, patience in steps:
            deadline = time.monotonic() + patience
            while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
                if self._process is not None:
                    self._process.send_signal(number)
                self._thread.join(0.25)
        self._thread = None


@contextlib.contextmanager
def embedded_postgres(
    data_dir: Path,
    *,
    durable: bool = True,
    port: int | None = None,
    settings: Mapping[str, str] = NO_SETTINGS,
) -> Iterator[EmbeddedPostgres]:
    """A running server for the length of the block.

    `durable=False` gives up every promise about crashes for speed. `port` is chosen freely when None.
    `settings` override the defaults, by PostgreSQL's names. Raises `EmbeddedPostgresError`; its leaf
    `DataFolderInUse` when another process has the folder.
    """
    server = EmbeddedPostgres(data_dir, durable=durable, port=port, settings=settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def running_url(data_dir: Path) -> str | None:
    """The URL of the server that another process runs on this folder, or None."""
    cluster_dir = data_dir.absolute() / "cluster"
    state = read_postmaster(cluster_dir)
    if state is None or state.status != "ready" or not serves(state.pid, cluster_dir):
        return None
    password: str = json.loads((data_dir / "credentials.json").read_text())[OWNER_ROLE]
    return address.url(OWNER_ROLE, password, state.port, OWNER_ROLE)
