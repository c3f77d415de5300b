"""Which path is answered by what.

Completions and responses go straight to their endpoint; everything else (models, health, metrics, errors) goes through Starlette, whose
routing and middleware would otherwise be a good part of what a call costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..codec import encode
from . import wire
from .app import Completions, Endpoint, Service
from .engine import RequestRefused
from .responses import Responses

_CHATS = "/v1/chat/completions"
_OPTIONAL = ("/completions", "/responses")


def build(service: Service, more: Sequence[BaseRoute] = ()) -> ASGIApp:
    """The app of a service, with more routes behind its own."""
    there = frozenset(getattr(service.engine, "endpoints", ()))
    endpoints: dict[str, Endpoint] = {_CHATS: Completions(service)}
    if "/completions" in there:
        endpoints["/v1/completions"] = Completions(service, "text")
    if "/responses" in there:
        endpoints["/v1/responses"] = Responses(service)
    rest = _rest(service, endpoints, more)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (endpoint or rest)(scope, receive, send)

    return app


def _rest(service: Service, endpoints: dict[str, Endpoint], more: Sequence[BaseRoute]) -> Starlette:
    async def models(request: Request) -> Response:
        service.authorize(request.scope)
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "mappa-graph"} for name in service.versions.names()]
        return Response(encode({"object": "list", "data": data}), media_type="application/json")

    async def health(_: Request) -> Response:
        return Response(encode({"status": "ok", "versions": service.versions.current}), media_type="application/json")

    async def metrics(_: Request) -> Response:
        text = service.metrics.text(service.versions.current, service.versions.running)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def lacking(request: Request) -> Response:
        service.authorize(request.scope)
        told = f"the {service.engine.name} engine has no {request.url.path}; chats go to {_CHATS}"
        raise RequestRefused(told, status=404, code="not_found")

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRefused)
        return Response(encode({"error": error.error}), status_code=error.status, media_type="application/json")

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        served = ", ".join((*endpoints, "/v1/models", "/health"))
        told = f"{request.method} {request.url.path}: {error.detail}; this gateway serves {served} and /metrics"
        return Response(
            wire.error_body(told, type="invalid_request_error", code="not_found"),
            status_code=error.status_code,
            headers=error.headers,
            media_type="application/json",
        )

    # A POST to an endpoint never gets here; a GET does, and is told that the path takes none.
    posted = [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
    missing = [Route(f"/v1{path}", lacking, methods=["POST"]) for path in _OPTIONAL if f"/v1{path}" not in endpoints]
    return Starlette(
        routes=[*posted, *missing, Route("/v1/models", models), Route("/health", health), Route("/metrics", metrics), *more],
        exception_handlers={RequestRefused: refused, HTTPException: unknown},
    )
