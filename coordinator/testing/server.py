"""A server process of the drill: `drill_types` on DATABASE_URL, with limits and failpoints from the environment. Prints its address
as one line of JSON when it is ready."""

from __future__ import annotations

import json
import os

import click

from coordinator.app import serve
from coordinator.config import settings_from_env
from coordinator.demo.launch import die_with_parent


def main() -> None:
    die_with_parent()
    serve(
        "coordinator.testing.drill_types:coordinator",
        url=os.environ["DATABASE_URL"],
        settings=settings_from_env(),
        port=0,
        on_ready=lambda url: click.echo(json.dumps({"url": url, "pid": os.getpid()})),
    )


if __name__ == "__main__":
    main()
