"""Following a decision from the command line: one line for each event, until it rests. A stream that breaks off is taken up again."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click
import msgspec

from coordinator.cli.client import Client
from coordinator.cli.picture import plain
from coordinator.cli.say import STATE_STYLES, Fault, short
from coordinator.core.sse import Frame, Parser

TRIES, PAUSE_S = 10, 1.0
"""How often in a row a stream that brings nothing is taken up again, and after how long."""
PIECE = 65_536


def follow(client: Client, id: str, *, as_json: bool) -> None:
    """Print the events of a decision as they come."""
    for frame in _frames(client, id):
        data = msgspec.json.decode(frame.data)
        if as_json:
            line = {"id": int(frame.id), "event": frame.event, "data": msgspec.Raw(frame.data.encode())}
            click.echo(msgspec.json.encode(line))
        elif frame.event != "decision":  # it is drawn by whoever asked to follow
            click.echo(_line(frame.event, data))


def _frames(client: Client, id: str) -> Iterator[Frame]:
    """Raises `Fault` when nothing comes any more."""
    after, tries = "", 0
    while tries < TRIES:
        tries += 1
        parser = Parser()
        try:
            with client.stream("decisions", id, "events", after=after) as response:
                while response.status == 200 and (piece := response.read1(PIECE)):
                    for frame in parser.feed(piece):
                        after, tries = frame.id, 0
                        yield frame
                        if frame.event == "decision":
                            return
                if response.status == 204:
                    return
        except (http.client.HTTPException, OSError) as error:
            click.echo(f"the stream broke off: {str(error) or type(error).__name__}", err=True)
        time.sleep(PAUSE_S)
    raise Fault(
        f"The stream of {id} breaks off again and again. `coordinator show {id}` tells how it stands."
    )


def _line(event: str, data: Mapping[str, Any]) -> str:
    said, state = _said(event, data), str(data.get("state") or data.get("status") or "")
    styles = STATE_STYLES.get(state, "").split()
    colour = next((style for style in styles if style not in ("dim", "bold")), None)
    return f"{click.style(event.ljust(10), bold=True)}{click.style(said, fg=colour)}"


def _said(event: str, data: Mapping[str, Any]) -> str:
    match event:
        case "queued":
            return f"in class {data['class']}"
        case "running":
            return "" if data["fencing_token"] == 1 else f"taken over, token {data['fencing_token']}"
        case "stage":
            return f"{data['stage']}  {data['ms']} ms"
        case "evidence":
            error, value = data.get("error"), data.get("value")
            told = error["code"] if error else plain(value) if value else ""
            return f"{data['name']}  {data['state']}  {short(told, 80)}  {data['elapsed_ms']} ms"
        case "part":
            return f"{data['evidence']}  {short(data['value'], 100)}"
        case "progress":
            return f"{data['evidence']}  " + " · ".join(data["lines"])
        case "outcome":
            wanted = data.get("evidence") or data.get("reason") or data.get("terms")
            return f"{data['kind']}  {plain(wanted) if wanted else ''}"
        case "fence":
            return "held" if data["held"] else "something moved"
        case "operation":
            return f"{data['effect']}  {data['state']}  {data.get('reference') or data.get('reason') or ''}"
        case "rest":
            return " ".join(filter(None, (data["status"], data.get("code"))))
        case _:
            return short(data, 100)
