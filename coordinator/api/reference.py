"""`/schema`: the OpenAPI document and an interactive page for it, which needs no network.

The page is Swagger UI from the package `swagger-ui-bundle-v2`, whose files are served from here. Nothing is loaded from
elsewhere; the Content-Security-Policy forbids it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from litestar import Request
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from coordinator.api.answer import Answer

ASSETS: Mapping[str, bytes] = {
    "swagger-ui.css": b"text/css; charset=utf-8",
    "swagger-ui-bundle.js": b"text/javascript; charset=utf-8",
    "favicon-32x32.png": b"image/png",
}
CACHED = (b"cache-control", b"public, max-age=86400")
POLICY = (
    b"content-security-policy",
    b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    b"font-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
)
PAGE = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Decision coordinator: API reference</title>
<link rel="icon" type="image/png" href="/schema/assets/favicon-32x32.png">
<link rel="stylesheet" href="/schema/assets/swagger-ui.css">
</head>
<body>
<div id="reference"></div>
<noscript>This page needs JavaScript. The document itself: <a href="/schema/openapi.json">/schema/openapi.json</a></noscript>
<script src="/schema/assets/swagger-ui-bundle.js"></script>
<script src="/schema/assets/start.js"></script>
</body>
</html>
"""
START = b"""SwaggerUIBundle({
  url: "/schema/openapi.json",
  dom_id: "#reference",
  deepLinking: true,
  persistAuthorization: false,
  tryItOutEnabled: true,
  validatorUrl: null,
});
"""


def routes(document: bytes) -> list[HTTPRouteHandler]:
    """The document, the page and its files."""
    html, script = (
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-type", b"text/javascript; charset=utf-8"),
    )
    return [
        _fixed("/schema/openapi.json", lambda: Answer(200, document)),
        _fixed("/schema", lambda: Answer(200, PAGE, [POLICY], content_type=html)),
        _fixed("/schema/assets/start.js", lambda: Answer(200, START, content_type=script)),
        *(_fixed(f"/schema/assets/{name}", _asset(name)) for name in ASSETS),
    ]


def _asset(name: str) -> Callable[[], Answer]:
    return lambda: Answer(200, _file(name), content_type=(b"content-type", ASSETS[name]), caching=CACHED)


def _fixed(path: str, make: Callable[[], Answer]) -> HTTPRouteHandler:
    async def handle(request: Request[Any, Any, Any]) -> ASGIApp:
        return make()

    return HTTPRouteHandler(path, http_method="GET")(handle)


@cache
def _file(name: str) -> bytes:
    """Found without importing the package, which would pull in a template engine."""
    spec = find_spec("swagger_ui_bundle")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the package swagger-ui-bundle-v2 is not installed")
    [folder] = Path(spec.origin).parent.glob("vendor/swagger-ui-*")
    return (folder / name).read_bytes()
