"""Access control: API keys, Host and Origin headers, body sizes, and error responses."""

import re
import secrets
import time
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import SnapKVError
from . import BILLING
from .anthropic.messages import MessageFormatter
from .api_error import ApiError, as_api_error
from .body_limits import limit_body
from .formatter import ResponseFormatter
from .log import log
from .metrics import Metrics

# Response headers with the request id.
OPENAI_ID_HEADER = "x-request-id"
ANTHROPIC_ID_HEADER = "request-id"
LOCAL = ("localhost", "127.0.0.1", "::1")
UNDER_V1 = ("chat", "completions", "messages", "models", "responses")
# Paths that need no key, because watchdogs and browsers send none.
PUBLIC = ("/health", "/")
ORIGIN = re.compile("[^/A-Z]+://[^/A-Z]+|null")  # pages opened from files have the origin "null"
# A name, an IPv4 address, or an IPv6 address in brackets.
HOST = re.compile(r"[^\s/:\[\]]+|\[[^\s/\[\]]+\]")


@dataclass(frozen=True)
class Settings:
    """The server's settings.

    Attributes:
        host: address to listen on. IPv6 addresses have no brackets.
        port: port to listen on.
        api_key: key that clients must send, or None if no key is required.
        origins: origins of web pages that may send requests (CORS).
        hosts: additional host names for this machine.
        body_bytes: maximum size of a request body in bytes.
        timeout: maximum seconds per request, or None for no limit.
        volatile_headers: names of header lines to remove from system prompts; see `drop_volatile_lines`.

    Raises: SnapKVError: the key is empty, the address is not local and there is no key, or a host or an origin is
        malformed.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    body_bytes: int = 32 * 1024 * 1024
    timeout: float | None = None
    volatile_headers: tuple[str, ...] = (BILLING,)

    def __post_init__(self):
        """Check the settings. Raises: SnapKVError: a setting is invalid, as described in the class docstring."""
        if self.api_key == "":
            raise SnapKVError("--api-key is empty: give a key, or drop the option")
        if self.api_key is None and not _is_local(self.host):
            raise SnapKVError(
                f"--host {self.host} accepts requests of other machines, so it needs --api-key: give one, or use "
                "127.0.0.1"
            )
        for origin in self.origins:
            if not ORIGIN.fullmatch(origin):
                raise SnapKVError(
                    "--allow-origin must be a page's scheme, host and port in small letters, such as "
                    f"http://localhost:3000, got {origin!r}"
                )
        for host in self.hosts:
            if not HOST.fullmatch(host):
                raise SnapKVError(
                    f"--allow-host must be a name without scheme and port, such as host.docker.internal, got {host!r}"
                )


class AllowedOrigins(CORSMiddleware):
    """Starlette's CORS middleware, applied only to requests from allowed origins.

    Requests from other origins go to `Gate` unchanged.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer preflights and add CORS headers to responses, if the request's origin is allowed."""
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" else None
        is_allowed = origin is not None and self.is_allowed_origin(origin)
        app = super().__call__ if is_allowed else self.app
        await app(scope, receive, send)


class Gate:
    """ASGI middleware that checks keys and hosts, and formats exceptions for the client's API.

    It also gives each request an id, and counts and logs the responses. It replaces Starlette's
    `TrustedHostMiddleware`, which responds in plain text that API clients can't parse.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics):
        """Wrap an app. Without an API key, the Host header must name this machine or a host from the settings."""
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._server_names = {*LOCAL, settings.host.lower(), *map(_host_name, settings.hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check an HTTP request, pass it to the application, and count the response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _normalize_request(scope)
        request_id = f"req_{secrets.token_hex(12)}"
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        arrival = time.monotonic()
        status = 0  # 0 until the response starts

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                header = ANTHROPIC_ID_HEADER if _is_anthropic(scope) else OPENAI_ID_HEADER
                MutableHeaders(scope=message)[header] = request_id
            await send(message)

        try:
            headers = MutableHeaders(scope=scope)
            self._require_access(scope, headers)
            headers["content-type"] = "application/json"  # `curl -d` labels the body as a form
            encoding = headers.get("content-encoding", "")
            receive_limited = limit_body(receive, self._settings.body_bytes, encoding)
            await self._app(scope, receive_limited, send_with_id)
        except Exception as error:
            response_has_started = status != 0
            if response_has_started:
                raise  # too late for an error response, so let the server close the connection
            await error_response(scope, error)(scope, receive, send_with_id)
        self._count_and_log(scope, status, seconds=time.monotonic() - arrival)

    def _require_access(self, scope: Scope, headers: Headers) -> None:
        """Check the key. If the server has no key, check the host and the origin instead.

        Raises: ApiError: the request is not allowed.
        """
        is_preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        # `AllowedOrigins` has already answered the preflights of allowed pages.
        if is_preflight and "origin" in headers:
            raise _page_not_allowed(headers["origin"])
        key = self._settings.api_key
        if key is None:
            self._reject_foreign_pages(headers)
        elif scope["path"] not in PUBLIC:
            _require_key(headers, key)

    def _count_and_log(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a response in the metrics, and log it if the request used an API."""
        # Label by route, not by path: labels are never freed, and clients can invent any number of paths.
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.responses.labels(route, str(status)).inc()
        if route.startswith("/v1/"):
            request_id = scope["state"]["request_id"]
            log.info("%s %s %d %.1f s %s", scope["method"], route, status, seconds, request_id)

    def _reject_foreign_pages(self, headers: Headers) -> None:
        """Check that a request does not come from a page on another website.

        A page on another website sends that site's name in the Host header (after DNS rebinding) or in the Origin
        header.

        Raises: ApiError: the host or the origin is not allowed.
        """
        host = headers.get("host", "")
        origin = headers.get("origin")
        if _host_name(host) not in self._server_names:
            raise ApiError(
                403,
                f"the Host header names {host[:80]!r}, which is not this server: if it is, start it with "
                f"--allow-host {_as_allowed_host(host)}",
            )
        if origin is None or origin in self._settings.origins:
            return
        _, _, origin_host = origin.partition("://")
        if _host_name(origin_host) not in self._server_names:
            raise _page_not_allowed(origin)


def _page_not_allowed(origin: str) -> ApiError:
    """Return an error for requests from a page whose origin is not allowed."""
    advice = "start the server with --allow-origin"
    return ApiError(403, f"pages of {origin[:80]!r} may not send requests: {advice}")


def _normalize_request(scope: Scope) -> Scope:
    """Return the scope with a path that the routes recognise, and with GET instead of HEAD.

    API paths get exactly one `/v1`, so clients can use a base URL with or without it. Trailing slashes are removed.
    """
    path = re.sub("^https?://[^/]*", "", scope["path"])  # clients using a proxy send the whole URL
    path = re.sub("/{2,}", "/", path)
    path = path.rstrip("/") or "/"
    path = re.sub("^(/v1)+(?=/v1/)", "", path)  # the client added /v1 to a base URL with /v1
    first_folder, _, _ = path.removeprefix("/").partition("/")
    if first_folder in UNDER_V1:
        path = f"/v1{path}"
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "path": path, "method": method}


def error_response(scope: Scope, error: Exception) -> JSONResponse:
    """Return an error response, in Anthropic's format for Anthropic's API and clients, otherwise in OpenAI's."""
    api_error = as_api_error(error, scope["state"]["request_id"])
    if api_error.status_code in (404, 405):
        api_error.detail = f"{api_error.detail}: {scope['method']} {scope['path'][:200]}"
    formatter = MessageFormatter if _is_anthropic(scope) else ResponseFormatter
    return JSONResponse(formatter.error(api_error), api_error.status_code, api_error.headers)


def _is_anthropic(scope: Scope) -> bool:
    """Return whether a request uses Anthropic's API or comes from Anthropic's client library."""
    return scope["path"].startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope)


def _require_key(headers: Headers, key: str) -> None:
    """Check that the headers contain the API key.

    Raises: ApiError: the key is missing or wrong.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    is_bearer = scheme.lower() == "bearer"
    client_key = token.strip() if is_bearer else headers.get("x-api-key", "")
    if not secrets.compare_digest(client_key.encode(), key.encode()):
        why = "the API key is missing or wrong: send it as 'Authorization: Bearer' or 'x-api-key'"
        raise ApiError(401, why, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _is_local(host: str) -> bool:
    """Return whether a host is "localhost" or a loopback address."""
    try:
        return host in LOCAL or ip_address(host).is_loopback
    except ValueError:
        return False


def _as_allowed_host(host: str) -> str:
    """Return the name in a Host header as a value for --allow-host, or the placeholder "NAME" if it is not valid."""
    name = _host_name(host)
    name = f"[{name}]" if ":" in name else name
    return name if len(name) <= 80 and HOST.fullmatch(name) else "NAME"


def _host_name(host: str) -> str:
    """Return a host in lower case, without its port and without the brackets of IPv6 addresses."""
    host = host.lower()
    is_ipv6 = host.startswith("[")
    if is_ipv6:
        return host[1 : host.find("]")]
    name, _, _ = host.partition(":")
    return name
