"""What a client is told when it is not answered, whatever API it speaks."""

from __future__ import annotations

import logging
import secrets

from ..batch.memory import NeverFits
from ..errors import EntryFileError, SnapKVError

log = logging.getLogger("mlx_snapkv.server")


class ApiError(Exception):
    """A request that can't be answered.

    Attributes:
        status: HTTP's.
        kind: OpenAI's `type`, such as `invalid_request_error`.
        code: OpenAI's `code`, or None.
        param: the field that is wrong, or None.
        headers: more of the response's.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message = status, message
        self.kind, self.code, self.param = kind, code, param
        self.headers = headers or {}


def bad_request(message: str, *, code: str | None = None, param: str | None = None) -> ApiError:
    return ApiError(400, message, code=code, param=param)


def too_long(n_tokens: int, most: int) -> ApiError:
    return _too_long(
        f"{n_tokens} tokens > {most} maximum; shorten it, or start the server with a larger --max-context"
    )


def _too_long(sentence: str) -> ApiError:
    """Agents know it by its code or its first words, and go on with a shorter conversation."""
    message = f"prompt is too long: {sentence}"
    return bad_request(message, code="context_length_exceeded", param="messages")


def busy(n_waiting: int) -> ApiError:
    return ApiError(
        429,
        f"{n_waiting} requests are waiting already: try again later",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": "5"},
    )


def internal(number: str) -> ApiError:
    return ApiError(
        500,
        f"the server failed on this request; its log tells more under {number}",
        kind="server_error",
        code="internal_error",
    )


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        408,
        f"the request was not answered within {seconds:g} seconds",
        kind="timeout_error",
        code="timeout",
    )


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception: its own mistake, or a number under which the log tells more."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NeverFits):
        return _too_long(str(error))
    number = secrets.token_hex(4)
    if isinstance(error, EntryFileError):
        log.error("request %s failed: %s", number, error)
    elif isinstance(error, SnapKVError):
        return bad_request(str(error))
    else:
        log.error("request %s failed", number, exc_info=error)
    return internal(number)
