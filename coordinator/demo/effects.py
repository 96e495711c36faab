"""Effects over HTTP: POST performs once per key, GET looks one up, both answer from the ledger.

How long a key is remembered and how soon a lookup sees an effect are the provider's properties, which a
control table may worsen (`dedup_window_s`, `lookup_lag_ms`). A lag that a POST met stays with that effect until
the table is replaced, even when that POST used the entry up; an entry in force also hides what happened before.
"""

import time
from urllib.parse import unquote

import msgspec
from aiohttp import web

from coordinator.demo.answers import allow, as_json
from coordinator.demo.faults import Control, Fault, Request
from coordinator.demo.ledger import Effect, Ledger
from coordinator.demo.refusals import Refusal

_MAX_KEY_LENGTH = 255


class Effects:
    """The routes below `/effects/`."""

    def __init__(self, ledger: Ledger, control: Control) -> None:
        self._ledger = ledger
        self._control = control
        self._visible_at: dict[tuple[str, str], float] = {}

    async def route(self, request: web.BaseRequest, rest: str, fault: Fault) -> web.Response:
        """`{name}` is POSTed to, `{name}/{key}` is looked up."""
        name, slash, key = rest.partition("/")
        if not name:
            raise Refusal("not-found", "An effect has a name: /effects/{name}.")
        if slash:
            allow(request, "GET")
            return self._look_up(unquote(name), unquote(key))
        allow(request, "POST")
        return await self._perform(request, unquote(name), fault)

    def forget_lags(self) -> None:
        """Everything that happened is visible from now on."""
        self._visible_at.clear()

    async def _perform(self, request: web.BaseRequest, name: str, fault: Fault) -> web.Response:
        key, payload = _idempotency_key(request), _canonical(await request.read())
        effect, replayed = self._ledger.perform(name, key, payload, time.time(), fault.dedup_window_s)
        if fault.lookup_lag_ms and not replayed:
            self._visible_at[name, key] = effect.at + fault.lookup_lag_ms / 1000
        await self._ledger.settled()
        if replayed:
            return as_json(_summary(effect), 200, {"Idempotent-Replayed": "true"})
        return as_json(_summary(effect), 201)

    def _look_up(self, name: str, key: str) -> web.Response:
        effect = self._ledger.find(name, key)
        if effect is None or time.time() < self._visible_from(effect):
            raise Refusal("not-found", f"No {name} with key {key!r} is known.")
        return as_json(_summary(effect) | {"payload": effect.payload})

    def _visible_from(self, effect: Effect) -> float:
        seen = Request("GET", f"/effects/{effect.name}/{effect.key}", "effects")
        lag_s = self._control.peek(seen).lookup_lag_ms / 1000
        return max(self._visible_at.get((effect.name, effect.key), 0.0), effect.at + lag_s)


def _summary(effect: Effect) -> dict[str, object]:
    return {"key": effect.key, "name": effect.name, "reference": effect.reference, "count": effect.count}


def _idempotency_key(request: web.BaseRequest) -> str:
    """The key, bare or quoted: both spellings are one key."""
    key = request.headers.get("Idempotency-Key")
    if key is None:
        raise Refusal("idempotency-key-missing", "An effect needs an Idempotency-Key header.")
    if len(key) > 1 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not 1 <= len(key) <= _MAX_KEY_LENGTH or not all("!" <= character <= "~" for character in key):
        raise Refusal("idempotency-key-invalid", f"A key is 1..{_MAX_KEY_LENGTH} visible ASCII characters.")
    return key


def _canonical(body: bytes) -> bytes:
    """The payload with sorted names and no spaces, so that a retry may spell it differently; none is null."""
    try:
        return msgspec.json.encode(msgspec.json.decode(body or b"null"), order="deterministic")
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise Refusal("malformed-request", f"The payload is JSON: {error}.") from None
