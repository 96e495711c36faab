"""uvicorn's HTTP protocol, made patient with slow work but not with slow senders.

uvicorn bounds neither the time a request takes to arrive nor the size of its headers, and speaks plain text where it refuses.
Here a request has `arrival_s` to arrive whole, its headers have at most `max_header_bytes`, a process has at most
`max_connections`, and every refusal is a problem document. A new connection that says nothing is closed after the same time.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from coordinator.api.problems import before_routing


class PatientProtocol(HttpToolsProtocol):
    """One connection. A timer runs from its beginning, and from each request's first byte, until the request is there."""

    arrival_s = 20.0
    max_header_bytes = 32 * 1024
    max_connections = 8192

    arrival: asyncio.TimerHandle | None = None
    header_bytes = 0
    headers_pending = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse("overloaded", "This process has as many connections as it can serve.")
        else:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.headers_pending and not self.transport.is_closing():  # one endless header reaches no callback
            self.header_bytes += len(data)
            if self.header_bytes > self.max_header_bytes:
                self.send_400_response("")

    def on_message_begin(self) -> None:
        self.header_bytes = 0
        self.headers_pending = True
        if self.arrival is None:
            self._expect_request()
        super().on_message_begin()
        # A stream whose client does not read can't be ended otherwise: closing waits until everything is sent.
        self.scope["extensions"] = {"coordinator.abort": self.transport.abort}  # type: ignore[dict-item]  # ours

    def on_header(self, name: bytes, value: bytes) -> None:
        self.header_bytes += len(name) + len(value) + len(": \r\n")
        if self.header_bytes > self.max_header_bytes:
            raise ValueError("headers too large")  # ends the parsing; uvicorn then calls send_400_response
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.headers_pending = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._request_is_there()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self.header_bytes > self.max_header_bytes:
            self._refuse(
                "headers-too-large", f"Headers may have at most {self.max_header_bytes} bytes together."
            )
        else:
            self._refuse("malformed-request", "This is not HTTP/1.1.")

    def _refuse(self, code: str, detail: str) -> None:
        """Answer with a problem and close, without the application."""
        if self.transport.is_closing():
            return
        answer = before_routing(code, detail)
        lines = [b"HTTP/1.1 %d %s" % (answer.status, HTTPStatus(answer.status).phrase.encode())]
        lines += [name + b": " + value for name, value in (*answer.headers, (b"connection", b"close"))]
        self.transport.write(b"\r\n".join((*lines, b"", answer.body)))
        self.transport.close()

    def _expect_request(self) -> None:
        self.arrival = self.loop.call_later(self.arrival_s, self._did_not_arrive)

    def _request_is_there(self) -> None:
        if self.arrival is not None:
            self.arrival.cancel()
            self.arrival = None

    def _did_not_arrive(self) -> None:
        self.arrival = None
        if not self.transport.is_closing():
            self.transport.close()
