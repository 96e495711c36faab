"""The command line. Each command lives in a file with its group and is imported when it is used: asking for help is quick.

Exit codes: 0 it is as it should be, 1 a fault was found or something failed (the message says what to do next), 2 wrong usage.
People get tables; ``--json`` gives programs what the service answered, one document on one line.
"""

from __future__ import annotations

import importlib

import click

COMMANDS = {
    "serve": "serve:serve",
    "demo": "demo:demo",
    "migrate": "database:migrate",
    "keys": "database:keys",
    "decide": "decisions:decide",
    "show": "decisions:show",
    "decisions": "decisions:decisions",
    "reviews": "decisions:reviews",
    "operations": "operations:operations",
    "receipts": "operations:receipts",
    "replay": "replay:replay",
    "drill": "drill:drill",
}
"""In the order of the help: from a first start to what auditors do."""


class Commands(click.Group):
    """Imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(f"coordinator.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="decision-coordinator", prog_name="coordinator")
def main() -> None:
    """Many read, one decides: fenced decisions over facts read in parallel, with receipts that anyone can check."""
