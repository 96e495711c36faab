"""The server under load, as a child process: prints one line of JSON once it serves."""

from __future__ import annotations

import json
import os
import sys

from coordinator.app import serve
from coordinator.config import settings_from_env
from coordinator.demo.launch import die_with_parent

DATABASE, PROVIDERS = "LOADTEST_DATABASE", "LOADTEST_PROVIDERS"
COORDINATOR = "LOADTEST_COORDINATOR"
"""MODULE:NAME of what is served, if it is not the usual one."""


def main() -> None:
    die_with_parent()
    serve(
        os.environ.get(COORDINATOR, "loadtests.served:coordinator"),
        url=os.environ[DATABASE],
        settings=settings_from_env(),
        port=0,
        processes=int(sys.argv[1]),
        on_ready=lambda address: print(json.dumps({"url": address}), flush=True),
    )


if __name__ == "__main__":
    main()
