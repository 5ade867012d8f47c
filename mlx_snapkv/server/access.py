"""Who may ask: keys, the Host header, and how much may come; before anything else sees a request."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .failures import ApiError
from .settings import Settings

OPEN = ("/health", "/")  # that a browser or a watchdog asks without a key


class Access:
    """ASGI middleware that lets pass what may; a refusal is raised as an ApiError for the handlers around it."""

    def __init__(self, app: ASGIApp, settings: Settings):
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        self._require_host(headers)
        self._require_origin(headers)
        self._require_key(headers, scope)
        await self._app(scope, self._limited(headers, receive), send)

    def _require_host(self, headers: Headers) -> None:
        """A web page whose name was pointed at this machine (DNS rebinding) sends that name."""
        host = headers.get("host", "")
        if self._settings.api_key is None and _name(host) not in self._settings.hosts:
            raise ApiError(403, f"the Host header names {host[:80]!r}, which this server is not")

    def _require_origin(self, headers: Headers) -> None:
        """A page of another site can send requests, even if it can't read what they come to."""
        origin = headers.get("origin")
        if origin is None or self._settings.api_key is not None or origin in self._settings.origins:
            return
        if _name(origin.partition("://")[2]) not in self._settings.hosts:
            raise ApiError(
                403, f"pages of {origin[:80]!r} may not ask: start the server with --allow-origin"
            )

    def _require_key(self, headers: Headers, scope: Scope) -> None:
        key = self._settings.api_key
        if key is None or scope["path"] in OPEN or scope["method"] == "OPTIONS":
            return
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        if not secrets.compare_digest(given.encode(), key.encode()):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer' or 'x-api-key'",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        most, n = self._settings.body_bytes, 0
        told = headers.get("content-length", "0")
        if told.isdecimal() and int(told) > most:
            raise _too_large(most)

        async def limited() -> Message:
            nonlocal n
            message = await receive()
            n += len(message.get("body", b""))
            if n > most:
                raise _too_large(most)
            return message

        return limited


def _name(host: str) -> str:
    """A host without its port."""
    return host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]


def _too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the request's body is larger than {most} bytes", code="request_too_large"
    )
