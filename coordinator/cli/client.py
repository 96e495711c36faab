"""The service over HTTP, as the commands use it: one request, one answer, and a refusal turned into what to do about it."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import click
import msgspec

from coordinator.cli.say import Fault

TIMEOUT_S = 30.0
NEXT = {
    "unauthenticated": "Pass --key or set COORDINATOR_KEY; `coordinator keys create` makes a key.",
    "missing-scope": "Use a key that has it: `coordinator keys create --scope SCOPE`.",
    "class-not-allowed": "Name another --class, or use a key that may: `coordinator keys create --scope decide --class CLASS`.",
    "stale-version": "Read the record again and decide anew, under a new key; nothing was sent.",
    "budget-exhausted": "Raise it with `coordinator budgets set`, or repeat the command once it has reset.",
    "own-request": "Somebody else has to review it, with a key of their own.",
    "stale-review": "Look at it as it is now: `coordinator reviews show ID`.",
    "review-unconfirmed": "Give the same verdict again in a moment.",
    "idempotency-key-reused": "Use another --key-id: this one stands for another request.",
    "decision-in-flight": "It is still running: repeat the command with the same --key-id.",
    "queue-full": "Repeat the command with the same --key-id in a moment.",
    "overloaded": "Repeat the command with the same --key-id in a moment.",
    "draining": "Repeat the command with the same --key-id in a moment.",
}


class Answer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    headers: Mapping[str, str]

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Client:
    """Speaks to one service with one key. Raises `Fault` for a refusal and when nothing answers."""

    def __init__(self, url: str, key: str | None) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise click.UsageError(f"--url must start with http:// or https://, not {url!r}")
        self._url = url.rstrip("/")
        self._key = key

    def get(self, *segments: str, **query: object) -> Answer:
        given = {name: value for name, value in query.items() if value is not None}
        path = "/v1/" + "/".join(quote(segment, safe="") for segment in segments)
        return self._send("GET", f"{path}?{urlencode(given)}" if given else path)

    def put(self, body: object, *segments: str) -> Answer:
        """Replacing is safe to repeat."""
        path = "/v1/" + "/".join(quote(segment, safe="") for segment in segments)
        return self._send("PUT", path, msgspec.json.encode(body))

    def post(
        self, path: str, body: object, headers: Mapping[str, str], *, wait_s: float = 0, on_silence: str = ""
    ) -> Answer:
        """``on_silence`` is what to do if no answer came: by then the request may have been carried out."""
        return self._send("POST", path, msgspec.json.encode(body), headers, wait_s, on_silence)

    def all(self, *segments: str, **query: object) -> Iterator[Any]:
        """The items of every page."""
        cursor: str | None = None
        while True:
            page = self.get(*segments, limit=200, cursor=cursor, **query).json()
            yield from page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    @contextmanager
    def stream(self, *segments: str, after: str) -> Iterator[http.client.HTTPResponse]:
        """An open stream of server-sent events, behind the event ``after``. What breaks it off is raised as it is."""
        path = "/v1/" + "/".join(quote(segment, safe="") for segment in segments)
        sent = {"Accept": "text/event-stream"} | ({"Last-Event-ID": after} if after else {})
        request = self._request("GET", path, None, sent)
        try:
            response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                raise refusal(error.code, error.read()) from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            if after:
                raise ConnectionError(f"no answer: {error}") from None
            raise self._silence(error, "") from None
        with response:
            yield response

    def _request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> urllib.request.Request:
        sent = {"Accept": "application/json", "User-Agent": "coordinator-cli", **headers}
        if body is not None:
            sent["Content-Type"] = "application/json"
        if self._key:
            sent["Authorization"] = f"Bearer {self._key}"
        return urllib.request.Request(self._url + path, data=body, headers=sent, method=method)

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0,
        on_silence: str = "",
    ) -> Answer:
        request = self._request(method, path, body, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S + wait_s) as response:
                return Answer(response.status, response.read(), dict(response.headers))
        except urllib.error.HTTPError as error:
            with error:
                raise refusal(error.code, error.read()) from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            raise self._silence(error, on_silence) from None

    def _silence(self, error: Exception, on_silence: str) -> Fault:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(why, ConnectionRefusedError):
            return Fault(
                f"Nothing answers at {self._url}. Start a service with `coordinator serve MODULE:NAME`, "
                "or pass the address of yours: --url."
            )
        return Fault(f"{self._url} gave no answer: {why}. {on_silence}".strip())


def refusal(status: int, body: bytes) -> Fault:
    """A problem document (RFC 9457) as a message that ends with the next step."""
    try:
        problem = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        return Fault(f"The service answered {status} without saying why. Is --url right?")
    code = str(problem.get("code", status))
    told = str(problem.get("detail") or problem.get("title") or status).strip()
    where = "".join(
        f"\n  {e.get('pointer') or '/'}: {e.get('detail')}"
        for e in problem.get("errors", ())
        if e.get("detail") != told
    )
    step = f"\n{NEXT[code]}" if code in NEXT else ""
    trace = f"\ntrace {problem['trace_id']}" if "trace_id" in problem else ""
    return Fault(f"{code}: {told}{where}{step}{trace}", body)


def client_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds ``--url`` and ``--key`` and hands the command a `Client`."""

    @click.option(
        "--url",
        envvar="COORDINATOR_URL",
        default="http://127.0.0.1:8080",
        show_default=True,
        show_envvar=True,
        help="Where the service is.",
    )
    @click.option("--key", envvar="COORDINATOR_KEY", show_envvar=True, help="An API key.")
    @wraps(command)
    def with_client(*, url: str, key: str | None, **options: object) -> None:
        command(Client(url, key), **options)

    return with_client
