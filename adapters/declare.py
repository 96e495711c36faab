"""Checks that run while a module loads, so that a wrong declaration names the line to mend instead of failing at night."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from coordinator.errors import DeclarationError

_OURS = str(Path(__file__).resolve().parent)
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_FORBIDDEN_IN_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def declared_at() -> str:
    """``file:line`` of the nearest caller outside the adapters."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def provider_of(url: str, what: str, where: str) -> str:
    """The host of an absolute http(s) URL, with its port if it names one: what a provider is called unless it is given a name.

    A placeholder in the authority would let a request choose the host it is sent to; credentials in a URL end up in logs.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise DeclarationError(f"{what}: not a URL: {error}", where) from None
    if parts.scheme not in ("http", "https") or not host:
        raise DeclarationError(f"{what}: the URL must start with http:// or https:// and a host", where)
    if "{" in parts.netloc or "}" in parts.netloc:
        raise DeclarationError(f"{what}: placeholders may not stand in the URL's host or port", where)
    if "@" in parts.netloc:
        raise DeclarationError(f"{what}: credentials belong into headers, not into the URL", where)
    if parts.fragment or not url.isascii() or any(char <= " " for char in url):
        raise DeclarationError(f"{what}: the URL must be ASCII without spaces or a fragment", where)
    return host if port is None else f"{host}:{port}"


def checked_headers(
    headers: Mapping[str, str] | None, reserved: Collection[str], what: str, where: str
) -> dict[str, str]:
    """A copy of static headers. ``reserved`` (lower case) are those that the adapter sets itself. No value is ever shown."""
    for name, value in (headers or {}).items():
        if not _HEADER_NAME.match(name):
            raise DeclarationError(f"{what}: {name!a} is not a header name", where)
        if name.lower() in reserved:
            raise DeclarationError(f"{what}: the header {name} is set by the adapter itself", where)
        if _FORBIDDEN_IN_VALUE.search(value):
            raise DeclarationError(f"{what}: the value of header {name} contains a control character", where)
    return dict(headers or {})
