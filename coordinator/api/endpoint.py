"""Endpoints: a declaration above each handler that routes it, checks its caller and describes it in the OpenAPI document.

    @endpoint("GET", "/v1/operations/{id}", "Show one operation", scopes=READERS, answers={200: Shown("...", OperationView)})
    async def show(call: Call) -> Answer: ...

What a declaration leaves out does not happen: a query parameter that is not declared is refused, and so is a body that says anything
(but for GET, whose body nobody reads); a scope that is not named opens nothing. No scopes at all means that no key is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from urllib.parse import quote, unquote
from uuid import UUID

from litestar import Request
from litestar.enums import HttpMethod
from litestar.handlers import ASGIRouteHandler, HTTPRouteHandler
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from coordinator.api.answer import Answer
from coordinator.api.auth import Keys, check_scope
from coordinator.api.body import check_nothing, read_bytes, read_json
from coordinator.api.paging import Query, parse_query, uuid
from coordinator.api.problems import answer_to, not_allowed
from coordinator.core.canonical import JsonValue
from coordinator.engine.service import Service
from coordinator.errors import NotFound, RequestRefused
from coordinator.store.keys import Key

Method = Literal["GET", "POST", "PUT"]
METHODS = [HttpMethod(method) for method in ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")]

READERS = frozenset({"decide", "review", "operate", "audit", "admin"})
"""Scopes that may see decisions, records and operations."""

NOBODY = Key(UUID(int=0), UUID(int=0), frozenset())


@dataclass(frozen=True, slots=True)
class Api:
    """What handlers work with, for as long as the service runs."""

    service: Service
    keys: Keys


@dataclass(frozen=True, slots=True)
class Call:
    """One request. ``caller`` is `NOBODY` where no key is asked for."""

    service: Service
    caller: Key
    scope: Scope
    receive: Receive
    query: Query

    @property
    def tenant(self) -> UUID:
        return self.caller.tenant

    async def body(self) -> JsonValue:
        return await read_json(self.scope, self.receive, self.service.settings.max_body_bytes)

    async def raw_body(self) -> bytes:
        return await read_bytes(self.scope, self.receive, self.service.settings.max_body_bytes)

    def segment(self, index: int) -> str:
        """A segment of the path, from its raw bytes: the only place where ``%2F`` is not a separator. Raises `NotFound`."""
        raw = raw_path(self.scope).rstrip("/").split("/")
        try:
            text = unquote(raw[index], errors="strict")
        except UnicodeDecodeError:
            raise nothing_here() from None
        if "\x00" in text:
            raise nothing_here()
        return text

    def id(self) -> UUID:
        """The id in ``/v1/things/{id}``. What is no id is answered like an absent one."""
        found = uuid(self.segment(3))
        if found is None:
            raise nothing_here()
        return found


def raw_path(scope: Scope) -> str:
    """The path as it was sent, still percent-encoded."""
    raw = scope.get("raw_path")
    return raw.decode("ascii", "replace") if raw else quote(scope["path"])


def nothing_here() -> NotFound:
    """The one answer for what is absent, for what is another tenant's and for what cannot be: they look alike on purpose."""
    return NotFound("There is no such thing, or it is not yours to see.")


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    where: Literal["path", "query", "header"]
    description: str
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})
    required: bool = False
    example: object = None


@dataclass(frozen=True, slots=True)
class Shown:
    """An answer as documented: a struct, a page of structs (``page``), or another media type. ``headers`` maps names to
    descriptions."""

    description: str
    kind: type | None = None
    page: bool = False
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request body as documented, with an example that works."""

    kind: type | None
    example: Mapping[str, Any]


Handler = Callable[[Call], Awaitable[Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    method: Method
    path: str
    summary: str
    description: str
    scopes: frozenset[str]
    parameters: Sequence[Parameter]
    body: Sent | None
    answers: Mapping[int, Shown]
    problems: Sequence[type[RequestRefused]]
    handler: Handler

    @property
    def tag(self) -> str:
        return self.path.removeprefix("/v1/").strip("/").split("/")[0]

    def queries(self) -> frozenset[str]:
        return frozenset(parameter.name for parameter in self.parameters if parameter.where == "query")

    async def answer(self, api: Api, scope: Scope, receive: Receive, queries: frozenset[str]) -> Answer:
        """Check the caller, the query string, and that no body comes where none is declared; then call the handler. Whatever is
        raised becomes a problem document."""
        try:
            caller = NOBODY
            if self.scopes:
                caller = await api.keys.caller(scope)
                check_scope(caller, self.scopes)
            query = parse_query(scope["query_string"], queries) if scope["query_string"] else {}
            call = Call(api.service, caller, scope, receive, query)
            if self.body is None and self.method != "GET":
                check_nothing(await call.raw_body())
            return await self.handler(call)
        except Exception as error:  # noqa: BLE001  # the process boundary towards the client; answer_to records it
            return answer_to(scope, error)


def endpoint(
    method: Method,
    path: str,
    summary: str,
    *,
    scopes: frozenset[str] = frozenset(),
    parameters: Sequence[Parameter] = (),
    body: Sent | None = None,
    answers: Mapping[int, Shown],
    problems: Sequence[type[RequestRefused]] = (),
) -> Callable[[Handler], Endpoint]:
    """Declare the function below as an endpoint; its docstring is the description."""

    def declare(handler: Handler) -> Endpoint:
        return Endpoint(
            method=method,
            path=path,
            summary=summary,
            description=" ".join((handler.__doc__ or "").split()),
            scopes=scopes,
            parameters=parameters,
            body=body,
            answers=answers,
            problems=problems,
            handler=handler,
        )

    return declare


def route(path: str, endpoints: Sequence[Endpoint]) -> ASGIRouteHandler | HTTPRouteHandler:
    """All endpoints of one path as a route of the framework.

    A path without parameters gets a route of the bare kind: it skips what the framework would parse, convert and check for each
    request, which ours read themselves. (The bare kind cannot have path parameters: Litestar 2.25 looks them up by method.)
    """
    by_method = {str(declared.method): (declared, declared.queries()) for declared in endpoints}
    allow = (b"allow", ", ".join(sorted({*by_method, "OPTIONS"})).encode())

    async def answer(scope: Scope, receive: Receive) -> Answer:
        method = str(cast(HTTPScope, scope)["method"])
        if (found := by_method.get(method)) is not None:
            declared, queries = found
            return await declared.answer(scope["litestar_app"].state.api, scope, receive, queries)
        return Answer(204, b"", [allow]) if method == "OPTIONS" else not_allowed(allow)

    async def bare(scope: Scope, receive: Receive, send: Send) -> None:
        await (await answer(scope, receive))(scope, receive, send)

    async def with_parameters(request: Request[Any, Any, Any]) -> ASGIApp:
        return await answer(request.scope, request.receive)

    if "{" not in path:
        return ASGIRouteHandler(path, name=path, copy_scope=False)(bare)
    typed = path.replace("}", ":str}")
    return HTTPRouteHandler(typed, http_method=METHODS, name=path)(with_parameters)


def by_path(endpoints: Sequence[Endpoint]) -> dict[str, list[Endpoint]]:
    ordered = sorted(endpoints, key=lambda declared: declared.path)
    return {
        path: list(group) for path, group in itertools.groupby(ordered, key=lambda declared: declared.path)
    }
