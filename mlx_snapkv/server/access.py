"""Who may ask, and how much: keys, the Host and Origin headers, the size of a body; and what the others get."""

import re
import secrets
from dataclasses import dataclass, replace
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..completions.body import Body, ChatBody
from ..errors import SnapKVError
from . import BILLING
from .anthropic.messages import MessageFormatter
from .api_error import ApiError, as_api_error
from .body_limits import limited
from .formatter import ResponseFormatter
from .metrics import Metrics

LOCAL = ("localhost", "127.0.0.1", "::1")
UNDER_V1 = ("chat", "completions", "messages", "models", "responses")
OPEN = ("/health", "/")  # a browser or a watchdog needs no key for these


@dataclass(frozen=True)
class Settings:
    """How the server was started: where, under which other host names, for which web pages (CORS), with how many
    seconds for a request.

    Raises: SnapKVError: the address is not local and there is no key, or no client sends such a host or origin.
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
        if not self.api_key and not _is_local(self.host):
            raise SnapKVError(
                f"--host {self.host} accepts requests of other machines, so it needs --api-key: give one, or use "
                "127.0.0.1"
            )
        for origin in self.origins:
            if not re.fullmatch("[^/A-Z]+://[^/A-Z]+|null", origin):  # the latter of a file's page
                raise SnapKVError(
                    "--allow-origin must be a page's scheme, host and port in small letters, such as "
                    f"http://localhost:3000, got {origin!r}"
                )

        for host in self.hosts:
            if not re.fullmatch(r"[^\s/:]+|\[[^\s/]+\]", host):
                raise SnapKVError(
                    f"--allow-host must be a name without scheme and port, such as host.docker.internal, got {host!r}"
                )

    def drop_volatile_lines(self, body: Body) -> None:
        """Drop the system prompt's first lines `name: …`, for those names in any case.

        They change with every request, and nothing behind them would be known from an earlier one.
        """
        names = "|".join(map(re.escape, self.volatile_headers))
        if names and isinstance(body, ChatBody) and body.messages[0].role == "system":
            first = body.messages[0]
            lines = rf"\A(\s*({names})[^\S\n]*:.*\n*)+"
            text = re.sub(lines, "", first.text, flags=re.IGNORECASE)
            body.messages[0] = replace(first, text=text)


class Gate:
    """ASGI middleware around everything: counts responses, and sends any exception in the API's own form.

    Starlette's `TrustedHostMiddleware` would refuse in plain text, which is no API's error.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics):
        self._app, self._settings, self._metrics = app, settings, metrics
        self._hosts = {*LOCAL, *(_name(host.lower()) for host in (settings.host, *settings.hosts))}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, scope = 0, _usual(scope)

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            headers = MutableHeaders(scope=scope)
            if self._settings.api_key is None:
                self._require_own_host(headers)
            elif scope["path"] not in OPEN and scope["method"] != "OPTIONS":
                _require_key(headers, self._settings.api_key)
            headers["content-type"] = "application/json"  # curl's -d would say it is a form
            encoding = headers.get("content-encoding", "")
            await self._app(scope, limited(receive, self._settings.body_bytes, encoding), noted)
        except Exception as error:
            if status:  # the response has begun: all that is left is to end it
                raise
            await error_response(scope, error)(scope, receive, noted)
        # By our own paths: clients may ask for any, and each would stay in memory.
        path = getattr(scope.get("route"), "path", "other")
        self._metrics.responses.labels(path, str(status)).inc()

    def _require_own_host(self, headers: Headers) -> None:
        """After DNS rebinding a page sends its own name as the host; one of another site sends its origin."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if _name(host) not in self._hosts:
            raise ApiError(
                403,
                f"the Host header names {host[:80]!r}, which is not this server: if it is, start it with "
                f"--allow-host {_name(host)[:80] or 'NAME'}",
            )
        if origin is None or origin in self._settings.origins:
            return
        if _name(origin.partition("://")[2]) not in self._hosts:
            advice = "start the server with --allow-origin"
            raise ApiError(403, f"pages of {origin[:80]!r} may not send requests: {advice}")


def _usual(scope: Scope) -> Scope:
    """A request as if the client's base URL had had `/v1` once and no slash at its end; a HEAD as the GET whose body
    nobody gets.
    """
    path = re.sub("^https?://[^/]*", "", scope["path"])  # as a proxy is asked
    path = re.sub("/{2,}", "/", path)
    path = re.sub("^(/v1)+(?=/v1/)", "", path.rstrip("/") or "/")
    if path.removeprefix("/").partition("/")[0] in UNDER_V1:
        path = f"/v1{path}"
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "path": path, "method": method}


def error_response(scope: Scope, error: Exception) -> JSONResponse:
    """In Anthropic's form for its paths, and for clients whose header says so."""
    refusal = as_api_error(error)
    if refusal.status_code in (404, 405):
        refusal.detail = f"{refusal.detail}: {scope['method']} {scope['path'][:200]}"
    messages = scope["path"].startswith("/v1/messages")
    is_anthropic = messages or "anthropic-version" in Headers(scope=scope)
    api = MessageFormatter if is_anthropic else ResponseFormatter
    return JSONResponse(api.error(refusal), refusal.status_code, refusal.headers)


def _require_key(headers: Headers, key: str) -> None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    sent = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    if not secrets.compare_digest(sent.encode(), key.encode()):
        why = "the API key is missing or wrong: send it as 'Authorization: Bearer' or 'x-api-key'"
        raise ApiError(401, why, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _is_local(host: str) -> bool:
    try:
        return host in LOCAL or ip_address(host).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """A host without its port."""
    host = host.lower()
    return host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
