"""MODULE:NAME on a command line: a path that leads nowhere is wrong usage, a declaration that is wrong is a fault."""

from __future__ import annotations

import click

from coordinator.cli.say import Fault
from coordinator.core.decision import Coordinator
from coordinator.errors import ConfigurationError, CoordinatorError


def load(path: str) -> Coordinator:
    from coordinator import app  # imports the web framework: a second that `--help` need not wait

    try:
        return app.load(path)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    except CoordinatorError as error:
        raise Fault(str(error)) from error
