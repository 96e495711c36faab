"""Failpoints: named places where a process can be made to die, to show that recovery works. Off unless the environment says so.

``COORDINATOR_FAILPOINTS="commit.before=kill,dispatch.sent=kill@2"`` kills the process (SIGKILL, nothing is flushed or closed) the
first time it passes ``commit.before``, and the second time it passes ``dispatch.sent``. `POINTS` lists all of them.
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "admit.before",  # the request is understood; nothing is stored
    "admit.after",  # the decision is durable
    "gather.after",  # the packet is frozen
    "decide.after",  # the policy has concluded
    "fence.after",  # the decisive fields are confirmed
    "commit.before",  # everything is written, COMMIT is not sent
    "commit.after",  # COMMIT was acknowledged; nothing was sent
    "dispatch.before",  # the operation is claimed, and about to be sent
    "dispatch.sent",  # the provider has answered; nothing is stored
    "settle.before",  # the operation's outcome is written, COMMIT is not sent
    "settle.after",  # the operation's outcome is durable
)


def _parse(text: str) -> dict[str, int]:
    armed = {}
    for entry in filter(None, text.split(",")):
        name, _, action = entry.partition("=")
        verb, _, hit = action.partition("@")
        if name not in POINTS or verb != "kill" or not (hit or "1").isdigit():
            raise ValueError(
                f"COORDINATOR_FAILPOINTS: {entry!r} is not NAME=kill[@N] with a name of {', '.join(POINTS)}"
            )
        armed[name] = int(hit or "1")
    return armed


_armed = _parse(os.environ.get("COORDINATOR_FAILPOINTS", ""))


def failpoint(name: str) -> None:
    """Die here, if the environment says so."""
    if name in _armed:
        _armed[name] -= 1
        if _armed[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
