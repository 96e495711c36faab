"""The command line. Each command lives in a file with its group and is imported when it is used: asking for help is quick.

Exit codes: 0 it is as it should be, 1 a fault was found or something failed (the message says what to do next), 2 wrong usage.
People get tables; ``--json`` gives programs what the service answered, one document on one line.
"""

from __future__ import annotations

import importlib
import importlib.metadata

import click

COMMANDS = {
    "serve": ("serve:serve", "Serve the Coordinator at MODULE:NAME."),
    "demo": ("demo:demo", "Everything at once on this machine, and a tour."),
    "migrate": ("database:migrate", "Bring the database to the current schema."),
    "keys": ("database:keys", "API keys: create, list, revoke."),
    "decide": ("decisions:decide", "Ask for a decision, wait for it, show it."),
    "show": ("decisions:show", "One decision as a picture."),
    "decisions": ("decisions:decisions", "Decisions, the newest first."),
    "reviews": ("reviews:reviews", "What waits for a person; approve, reject."),
    "operations": ("operations:operations", "What was sent; resolve, retry, compensate, reconcile."),
    "pools": ("pools:pools", "Providers, slots and rates; --watch."),
    "queues": ("queues:queues", "What waits and runs, by class; --watch."),
    "worker": ("worker:worker", "Run a program for each task of a remote worker."),
    "workers": ("worker:workers", "Remote workers and how busy they are."),
    "locks": ("locks:locks", "Named locks, and the decisions that hold them."),
    "budgets": ("budgets:budgets", "What may be spent, and what is left of it."),
    "receipts": ("operations:receipts", "Receipts in the order of the log."),
    "replay": ("replay:replay", "Run a stored decision's policy again."),
    "drill": ("drill:drill", "The conflict and crash suite."),
}
"""Where each command is and its line in the help, in the help's order: from a first start to what auditors do."""


class Commands(click.Group):
    """Imports a command when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(f"coordinator.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def _say_version(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
    if asked:
        try:
            version = importlib.metadata.version("decision-coordinator")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed: run from its source)"
        click.echo(f"coordinator {version}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, callback=_say_version, expose_value=False, is_eager=True)
def main() -> None:
    """Many read, one decides: fenced decisions over facts read in parallel, with receipts that anyone can check."""
