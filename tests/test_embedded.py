"""A PostgreSQL server of our own: who may use it, who dies with whom, and what survives."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest

from coordinator.embedded import (
    DataFolderInUse,
    EmbeddedPostgres,
    EmbeddedPostgresError,
    embedded_postgres,
    running_url,
)
from coordinator.embedded.folder import serves
from tests.support.postgres import data_folder
from tests.support.waiting import eventually, eventually_now

ROOT = Path(__file__).parent.parent
DEBIAN_BINARIES = sorted(
    path for path in Path("/usr/lib/postgresql").glob("1[5-9]/bin") if (path / "initdb").exists()
)


@pytest.fixture
def folder() -> Iterator[Path]:
    with data_folder() as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with data_folder() as made, embedded_postgres(made) as running:
        yield running


@contextmanager
def owner(folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns a server in `folder`; killed at the end if it still lives."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.owner", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def server_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The pid and the URL that an owner prints."""
    assert process.stdout is not None
    assert process.stderr is not None
    pid, _, url = process.stdout.readline().strip().partition(" ")
    assert pid, process.stderr.read()
    return int(pid), url


async def test_the_service_owns_its_database_and_is_no_superuser(server: EmbeddedPostgres) -> None:
    connection = await asyncpg.connect(server.url)
    assert (
        await connection.fetchval("SELECT current_user || '/' || current_database()")
        == "coordinator/coordinator"
    )
    role = await connection.fetchrow(
        "SELECT rolsuper, rolbypassrls, rolcreatedb, rolcreaterole FROM pg_roles WHERE rolname = current_user"
    )
    assert tuple(role) == (False, False, False, True)
    await connection.close()


async def test_row_level_security_applies_to_the_service(server: EmbeddedPostgres) -> None:
    connection = await asyncpg.connect(server.url)
    await connection.execute("""
        CREATE TABLE secrets (tenant int);
        ALTER TABLE secrets ENABLE ROW LEVEL SECURITY;
        ALTER TABLE secrets FORCE ROW LEVEL SECURITY;
        CREATE POLICY own ON secrets USING (tenant = current_setting('t.tenant')::int) WITH CHECK (true);
        INSERT INTO secrets VALUES (1), (2);
        SET t.tenant = '2';
    """)
    assert await connection.fetch("SELECT * FROM secrets") == [(2,)]
    await connection.close()


@pytest.mark.parametrize("binaries", [None, *DEBIAN_BINARIES], ids=str)
async def test_the_service_may_create_a_role_and_assume_it(
    folder: Path, binaries: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if binaries:
        monkeypatch.setenv("COORDINATOR_PG_BIN", str(binaries))
    with embedded_postgres(folder, durable=False) as server:
        connection = await asyncpg.connect(server.url)
        await connection.execute("CREATE ROLE coordinator_app NOLOGIN; GRANT coordinator_app TO current_user")
        await connection.execute("BEGIN; SET LOCAL ROLE coordinator_app")
        assert await connection.fetchval("SELECT current_user") == "coordinator_app"
        await connection.close()


async def test_only_loopback_and_only_with_the_password(server: EmbeddedPostgres) -> None:
    assert server.psql("SHOW listen_addresses") == "127.0.0.1"
    assert server.psql("SHOW unix_socket_directories") == ""
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(server.superuser_url, password="postgres")


def test_durable_is_the_default_and_speed_is_asked_for(server: EmbeddedPostgres, folder: Path) -> None:
    names = "('fsync', 'full_page_writes', 'synchronous_commit')"
    promises = f"SELECT string_agg(setting, ' ') FROM pg_settings WHERE name IN {names}"
    assert server.psql(promises) == "on on on"
    with embedded_postgres(folder, durable=False) as fast:
        assert fast.psql(promises) == "off off off"


async def test_settings_override_the_defaults(folder: Path) -> None:
    with embedded_postgres(folder, durable=False, settings={"max_connections": "17"}) as server:
        connection = await asyncpg.connect(server.url)
        assert await connection.fetchval("SHOW max_connections") == "17"
        await connection.close()


def test_the_passwords_are_readable_by_their_owner_alone(server: EmbeddedPostgres) -> None:
    assert stat.S_IMODE((server.data_dir / "credentials.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(server.cluster_dir.stat().st_mode) == 0o700


def test_a_database_can_be_copied_and_dropped_while_it_is_used(server: EmbeddedPostgres) -> None:
    server.create_database("origin")
    server.psql("CREATE TABLE t AS SELECT 7 AS n", database="origin")
    url = server.create_database("copy", template="origin")
    assert server.psql("SELECT n FROM t", database="copy") == "7"
    with psql_session(server, url):
        server.drop_database("copy")
    assert server.psql("SELECT count(*) FROM pg_database WHERE datname = 'copy'") == "0"


@contextmanager
def psql_session(server: EmbeddedPostgres, url: str) -> Iterator[subprocess.Popen[str]]:
    """A client that is connected and idle in a transaction."""
    command = [str(server.bin_dir / "psql"), "-XAtq", url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write("BEGIN; SELECT 'connected';\n")
        client.stdin.flush()
        assert client.stdout.readline() == "connected\n"
        yield client
        client.kill()


def test_a_second_start_finds_the_data_of_the_first(folder: Path) -> None:
    with embedded_postgres(folder) as first:
        first.psql("CREATE TABLE kept AS SELECT 42 AS n", database="coordinator")
        url = first.url
    with embedded_postgres(folder, port=first.port) as second:
        assert second.url == url
        assert second.psql("SELECT n FROM kept", database="coordinator") == "42"


def test_a_client_in_a_transaction_does_not_hold_up_the_stop(folder: Path) -> None:
    with embedded_postgres(folder, durable=False) as server, psql_session(server, server.url):
        pid = server.pid
        server.stop()
        assert not serves(pid, server.cluster_dir)


def test_a_second_owner_is_refused_and_told_who_has_the_folder(folder: Path) -> None:
    with owner(folder) as process:
        server_of(process)
        with pytest.raises(DataFolderInUse, match=f"pid {process.pid}") as refused, embedded_postgres(folder):
            pass
        assert refused.value.pid == process.pid


def test_a_command_beside_the_service_finds_the_running_server(folder: Path) -> None:
    assert running_url(folder) is None
    with owner(folder) as process:
        _, url = server_of(process)
        assert running_url(folder) == url
        process.communicate("")
    assert running_url(folder) is None


def test_a_server_dies_with_its_killed_owner_and_the_next_owner_finds_the_data(folder: Path) -> None:
    with owner(folder) as process:
        pid, _ = server_of(process)
        process.kill()
        process.wait()
        with embedded_postgres(folder) as server:
            assert not serves(pid, server.cluster_dir)
            assert server.psql("SELECT count(*) FROM pg_database WHERE datname = 'coordinator'") == "1"


def test_a_crashed_server_is_started_again_on_its_port_with_what_was_committed(folder: Path) -> None:
    with embedded_postgres(folder) as server:
        server.psql("CREATE TABLE kept AS SELECT 42 AS n", database="coordinator")
        crashed = server.pid
        os.kill(crashed, signal.SIGKILL)
        assert eventually_now(lambda: answers(server, "SELECT n FROM kept")) == "42"
        assert server.pid != crashed


def answers(server: EmbeddedPostgres, sql: str) -> str:
    """What the database says, or nothing while it does not."""
    try:
        return server.psql(sql, database="coordinator")
    except EmbeddedPostgresError:
        return ""


def test_a_killed_server_stays_down_until_it_is_started(folder: Path) -> None:
    with embedded_postgres(folder) as server:
        server.psql("CREATE TABLE kept AS SELECT 42 AS n", database="coordinator")
        server.kill()
        assert answers(server, "SELECT n FROM kept") == ""
        server.start()
        assert answers(server, "SELECT n FROM kept") == "42"


async def test_a_server_outlives_the_thread_that_started_it(folder: Path) -> None:
    server = EmbeddedPostgres(folder, durable=False)
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    pid = server.pid
    await eventually(
        lambda: not starter.is_alive() and not Path(f"/proc/self/task/{starter.native_id}").exists()
    )
    assert server.psql("SELECT 1") == "1"
    assert server.pid == pid
    server.stop()


def test_a_terminals_interrupt_is_for_the_owner_alone(server: EmbeddedPostgres) -> None:
    assert os.getpgid(server.pid) != os.getpgid(0)


def test_what_a_killed_maker_left_behind_is_swept_away(folder: Path) -> None:
    (folder / "cluster.new-half" / "base").mkdir(parents=True)
    with embedded_postgres(folder, durable=False) as server:
        assert server.psql("SELECT 1") == "1"
    assert list(folder.glob("cluster.new-*")) == []


def test_a_setting_that_postgresql_refuses_is_reported_in_its_words_and_frees_the_folder(
    folder: Path,
) -> None:
    with (
        pytest.raises(EmbeddedPostgresError, match="shared_buffers"),
        embedded_postgres(folder, settings={"shared_buffers": "much"}),
    ):
        pass
    with embedded_postgres(folder) as server:
        assert server.psql("SELECT 1") == "1"


def test_missing_binaries_are_reported_with_the_ways_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COORDINATOR_PG_BIN", str(folder))
    with pytest.raises(EmbeddedPostgresError, match=r"embedded-postgres|DATABASE_URL"):
        EmbeddedPostgres(folder)


def test_a_cluster_of_another_major_version_is_left_alone(folder: Path) -> None:
    with embedded_postgres(folder, durable=False) as server:
        pass
    (server.cluster_dir / "PG_VERSION").write_text("14\n")
    with pytest.raises(EmbeddedPostgresError, match="made by PostgreSQL 14"), embedded_postgres(folder):
        pass


def test_a_server_that_somebody_else_started_is_not_stopped(folder: Path) -> None:
    """As seen after an owner without a death signal was killed: its server still runs, and nobody holds the folder."""
    with owner(folder, PATH=path_without("setpriv", folder)) as process:
        pid, _ = server_of(process)
        process.kill()
        process.wait()
        try:
            with pytest.raises(DataFolderInUse, match=f"pid {pid}"), embedded_postgres(folder):
                pass
        finally:
            os.kill(pid, signal.SIGINT)
    eventually_now(lambda: not serves(pid, folder / "cluster"))


@pytest.mark.skipif(os.geteuid() != 0, reason="is about root")
def test_root_without_user_namespaces_runs_the_server_as_nobody(folder: Path) -> None:
    reachable = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "test", "-x"]
    if subprocess.run([*reachable, str(EmbeddedPostgres(folder).bin_dir / "postgres")]).returncode:
        pytest.skip("the binaries lie in a folder that nobody may enter")
    with owner(folder, PATH=path_without("unshare", folder)) as process:
        pid, _ = server_of(process)
        assert Path(f"/proc/{pid}").stat().st_uid == 65534
    eventually_now(lambda: not serves(pid, folder / "cluster"))
    with embedded_postgres(folder) as server:
        assert Path(f"/proc/{server.pid}").stat().st_uid == 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="is about root")
def test_root_without_any_way_to_drop_its_rights_is_told_what_to_do(folder: Path) -> None:
    with owner(folder, PATH=path_without("unshare", folder, "setpriv")) as process:
        _, said = process.communicate()
    assert "refuses to run as root" in said
    assert "DATABASE_URL" in said
    assert process.returncode == 1


def path_without(program: str, folder: Path, *more: str) -> str:
    """A PATH with util-linux's two tools, less the named ones."""
    tools = folder / "tools"
    tools.mkdir()
    for name in {"unshare", "setpriv", "test"} - {program, *more}:
        (tools / name).symlink_to(str(shutil.which(name)))
    return str(tools)
