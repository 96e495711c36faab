"""Failpoints: named places where a process can be made to fail, to show that recovery works. Off unless the environment says so.

``COORDINATOR_FAILPOINTS="commit.before=kill,dispatch.sent=lose@2"`` kills the process the first time it passes ``commit.before``, and
loses the answer of the second send. `POINTS` lists all of them. Each fires once, and says so in the log. What can happen there:

    kill    SIGKILL: nothing is flushed or closed
    raise   an exception that nobody expects
    hang    the task never goes on, and keeps whatever it holds
    lose    the reply of this step never comes. Before COMMIT, it was lost on its way; after it, only its answer was: either way the
            caller knows nothing (`CommitUnknown`). Before a send, nothing reached the provider; after it, the answer did not reach
            us: either way the connection broke (`ConnectionResetError`)
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import Literal, get_args

from coordinator.errors import CommitUnknown

log = logging.getLogger(__name__)
Action = Literal["kill", "raise", "hang", "lose"]
ACTIONS: tuple[Action, ...] = get_args(Action)
Lost = Callable[[str], Exception]

POINTS: dict[str, Lost | None] = {
    "admit.before": CommitUnknown,  # the decision is written, COMMIT is not sent
    "admit.after": CommitUnknown,  # the decision is durable
    "lock.before": CommitUnknown,  # its named locks are taken, COMMIT is not sent
    "lock.after": CommitUnknown,  # its named locks are taken; nothing was read
    "gather.after": None,  # the packet is frozen
    "decide.after": None,  # the policy has concluded
    "fence.after": None,  # the decisive fields are confirmed
    "commit.before": CommitUnknown,  # everything is written, COMMIT is not sent
    "commit.after": CommitUnknown,  # COMMIT was acknowledged; nothing was sent
    "claim.before": CommitUnknown,  # something was claimed that is due or was another's, COMMIT is not sent
    "claim.after": CommitUnknown,  # the claim is durable; nothing was begun
    "dispatch.before": ConnectionResetError,  # the operation is claimed, and about to be sent
    "dispatch.sent": ConnectionResetError,  # the provider has answered, the sink has not told us yet
    "dispatch.after": None,  # we know what the provider answered; nothing is stored
    "ask.before": ConnectionResetError,  # the provider is about to be asked by key
    "ask.sent": ConnectionResetError,  # it has answered, the sink has not told us yet
    "settle.before": CommitUnknown,  # the operation's outcome is written, COMMIT is not sent
    "settle.after": CommitUnknown,  # the operation's outcome is durable
    "resolve.before": CommitUnknown,  # what a person said of an operation is written, COMMIT is not sent
    "resolve.after": CommitUnknown,  # what a person said is durable
    "review.before": CommitUnknown,  # a reviewer's verdict is written, COMMIT is not sent
    "review.after": CommitUnknown,  # it is durable: rejected, or claimed for the approval, of which nothing is done yet
    "notice.before": CommitUnknown,  # what a provider said of itself is written, COMMIT is not sent
    "notice.after": CommitUnknown,  # what it said is durable
}
"""Every point, and the error by which its caller learns that the reply is lost; None where no reply is under way."""


class FailpointError(Exception):
    """What ``raise`` raises."""


def actions(point: str) -> tuple[Action, ...]:
    """What can happen at ``point``."""
    return ACTIONS if POINTS[point] else tuple(action for action in ACTIONS if action != "lose")


def parse(text: str) -> dict[str, tuple[Action, int]]:
    """What is to happen where, and at which passing. Raises ValueError, naming all points, for what is none of them."""
    armed: dict[str, tuple[Action, int]] = {}
    for entry in filter(None, text.split(",")):
        name, _, rest = entry.partition("=")
        verb, at, hit = rest.partition("@")
        action = next((known for known in actions(name) if known == verb), None) if name in POINTS else None
        if action is None or (at and not (hit.isascii() and hit.isdigit() and int(hit))):
            with_reply = ", ".join(name for name, lost in POINTS.items() if lost)
            raise ValueError(
                f"COORDINATOR_FAILPOINTS: {entry!r} is not NAME={'|'.join(ACTIONS)}[@N] with a name of {', '.join(POINTS)};"
                f" a reply can be lost at {with_reply}"
            )
        armed[name] = (action, int(hit or "1"))
    return armed


_armed: dict[str, tuple[Action, int]] = {}


def arm(text: str) -> None:
    """What the environment says is armed when this module is loaded; a process that is forked later is told here."""
    _armed.clear()
    _armed.update(parse(text))


async def failpoint(name: str) -> None:
    """Fail here, if we were told to."""
    if not _armed or name not in _armed:
        return
    action, left = _armed.pop(name)
    if left > 1:
        _armed[name] = (action, left - 1)
        return
    log.warning("failpoint %s: %s", name, action)
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise FailpointError(f"failpoint {name}")
        case "hang":
            await asyncio.Event().wait()
        case "lose":
            lost = POINTS[name]
            assert lost is not None, "checked when it was armed"
            raise lost(f"failpoint {name}: the reply is lost")


arm(os.environ.get("COORDINATOR_FAILPOINTS", ""))
