"""A client of server-sent events that reads when it likes to."""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from coordinator.core.sse import Frame, Parser
from tests.api.serving import Client


@dataclass
class Stream:
    """An open connection. ``status`` and ``headers`` are there; events are read one by one."""

    socket: socket.socket
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    whole: bool = False
    """Whether the last chunk has come: the stream ended, and did not break off."""
    _raw: bytes = b""
    _parser: Parser = field(default_factory=Parser)
    _frames: deque[Frame] = field(default_factory=deque)

    def head(self) -> None:
        while b"\r\n\r\n" not in self._raw:
            piece = self.socket.recv(65_536)
            assert piece, self._raw
            self._raw += piece
        head, _, self._raw = self._raw.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        self.status = int(first.split()[1])
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    def events(self) -> Iterator[Frame]:
        """Until it ends or breaks off; whoever stops in between can go on later."""
        while True:
            while self._frames:
                yield self._frames.popleft()
            chunk = next(self.chunks(), None)
            if chunk is None:
                return
            self._frames.extend(self._parser.feed(chunk))

    def chunks(self) -> Iterator[bytes]:
        while True:
            while b"\r\n" not in self._raw:
                if not self._more():
                    return
            size, _, self._raw = self._raw.partition(b"\r\n")
            length = int(size, 16)
            while len(self._raw) < length + 2:
                if not self._more():
                    return
            if length == 0:
                self.whole = True
                return
            chunk, self._raw = self._raw[:length], self._raw[length + 2 :]
            yield chunk

    def _more(self) -> bool:
        try:
            piece = self.socket.recv(65_536)
        except ConnectionError:
            return False
        self._raw += piece
        return bool(piece)


@contextmanager
def following(
    client: Client, id: str, after: str | int | None = None, *, receive_buffer: int | None = None
) -> Iterator[Stream]:
    """Follow a decision. ``receive_buffer`` bytes, where the client is to be slow."""
    place = urlsplit(client.address)
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(60)
        connection.connect((place.hostname, place.port))
        lines = [f"GET /v1/decisions/{id}/events HTTP/1.1", "Host: x", f"Authorization: Bearer {client.key}"]
        lines += [f"Last-Event-ID: {after}"] if after is not None else []
        connection.sendall("\r\n".join((*lines, "", "")).encode())
        stream = Stream(connection)
        stream.head()
        yield stream


def all_events(client: Client, id: str, after: str | int | None = None) -> list[tuple[int, str, Any]]:
    """To the end of the stream, which has to be whole."""
    with following(client, id, after) as stream:
        assert stream.status == 200
        events = [(int(frame.id), frame.event, json.loads(frame.data)) for frame in stream.events()]
        assert stream.whole
    return events
