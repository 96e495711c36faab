"""Server-sent events: how an event is written, and a parser that does not care where its input was cut.

As the HTML standard has it (https://html.spec.whatwg.org/multipage/server-sent-events.html): UTF-8 with an optional BOM, lines that
end in LF, CR or CRLF, an event at each empty line, none for what is left at the end. The parser bounds what it keeps.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator

import msgspec

HEARTBEAT = b":\n\n"
"""A comment: it says that the stream lives, and to parsers nothing."""


class Frame(msgspec.Struct, frozen=True):
    """One event as it was parsed. ``id`` is the last id seen, which may be that of an earlier event."""

    event: str
    data: str
    id: str


class FrameTooLarge(ValueError):
    """A line or an event went past the bound; nothing after it can be trusted."""


def written(kind: str, data: bytes, id: int) -> bytes:
    """An event whose data is JSON, hence has no line break. ``kind`` and ``id`` are our own words and numbers."""
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (id, kind.encode("ascii"), data)


class Parser:
    """Feed it pieces as they come. ``max_chars`` bounds one event, and one line."""

    def __init__(self, max_chars: int = 1_048_576) -> None:
        self.last_id = ""
        self.retry_ms: int | None = None
        """How long to wait before connecting again, if the stream said so."""
        self._max = max_chars
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
        self._line: list[str] = []
        self._after_cr = False
        self._data: list[str] = []
        self._event = ""
        self._size = 0

    def feed(self, piece: bytes) -> Iterator[Frame]:
        """The events that this piece completes. Raises `FrameTooLarge`."""
        text = self._decode(piece)
        if self._after_cr and text:
            text = text[1:] if text[0] == "\n" else text
            self._after_cr = False
        self._after_cr = text.endswith("\r") or (self._after_cr and not text)
        *whole, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for line in whole:
            line = "".join((*self._line, line))
            self._line.clear()
            self._grow(len(line))
            if line:
                self._field(line)
            elif (frame := self._dispatched()) is not None:
                yield frame
        if rest:
            self._line.append(rest)
            self._grow(len(rest))

    def _grow(self, chars: int) -> None:
        self._size += chars
        if self._size > self._max:
            raise FrameTooLarge(f"an event of more than {self._max} characters")

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "data":
                self._data.append(value)
            case "event":
                self._event = value
            case "id" if "\0" not in value:
                self.last_id = value
            case "retry" if value.isascii() and value.isdigit():
                self.retry_ms = int(value[:9])

    def _dispatched(self) -> Frame | None:
        frame = Frame(self._event or "message", "\n".join(self._data), self.last_id) if self._data else None
        self._data.clear()
        self._event = ""
        self._size = 0
        return frame
