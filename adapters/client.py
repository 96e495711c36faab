"""The HTTP client that all adapters of a process share: one aiohttp session per event loop, made on first use.

Connections are kept alive for less than the 5 s after which common servers drop idle ones, because a request that meets a
connection just being dropped is, for a POST, an ambiguous answer. `fresh=True` gives a session without keep-alive: one
handshake more, and that cause of ambiguity is gone; for sinks whose provider would act twice on a repeat.

A POST is never sent twice by the client: aiohttp repeats a request on a dropped connection only for idempotent methods
(`IDEMPOTENT_METHODS`), and redirects are never followed. No cookies, no proxies or credentials from the environment.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import aiohttp

from coordinator.core.evidence import clean_text

KEEPALIVE_S = 4.0
CONNECTIONS = 2_048
"""A backstop only: the limits that matter are those of the providers' pools."""
DNS_TTL_S = 10
CONNECT_SHARE = 0.9
"""Of the total timeout: a connection that isn't there by then provably carried nothing."""


@dataclass(slots=True)
class _Sessions:
    kept: aiohttp.ClientSession | None = None
    fresh: aiohttp.ClientSession | None = None


_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, _Sessions] = WeakKeyDictionary()


def session(*, fresh: bool = False) -> aiohttp.ClientSession:
    """The running loop's session; ``fresh`` for one that opens a connection per request."""
    loop = asyncio.get_running_loop()
    mine = _sessions.get(loop)
    if mine is None:
        mine = _sessions[loop] = _Sessions()
    if fresh:
        if mine.fresh is None or mine.fresh.closed:
            mine.fresh = _open(force_close=True)
        return mine.fresh
    if mine.kept is None or mine.kept.closed:
        mine.kept = _open(force_close=False)
    return mine.kept


def _open(*, force_close: bool) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        limit=CONNECTIONS,
        ttl_dns_cache=DNS_TTL_S,
        force_close=force_close,
        keepalive_timeout=None if force_close else KEEPALIVE_S,
    )
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"User-Agent": "decision-coordinator"},
        trust_env=False,
        timeout=aiohttp.ClientTimeout(total=30),
    )


async def close_clients() -> None:
    """Close the running loop's sessions. The next use opens new ones."""
    mine = _sessions.pop(asyncio.get_running_loop(), None)
    for opened in (mine.kept, mine.fresh) if mine else ():
        if opened is not None:
            await opened.close()


def within(total_s: float) -> aiohttp.ClientTimeout:
    """Everything within ``total_s``, connecting within nine tenths of it; exact, where aiohttp would round to whole seconds."""
    return aiohttp.ClientTimeout(total=total_s, connect=total_s * CONNECT_SHARE, ceil_threshold=float("inf"))


def describe(error: BaseException) -> str:
    """An error's text without the URL, whose query may hold a secret."""
    text = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    return clean_text(f"{type(error).__name__}: {text}" if text else type(error).__name__)
