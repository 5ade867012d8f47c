"""Errors that the server sends to clients of any API."""

from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..batch.memory import NeverFits
from ..completions.contents import replace_surrogates
from ..completions.validation import describe_error
from ..errors import EntryFileError, OptionError, SnapKVError
from .log import log

ERROR_TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An error with an HTTP status and a sentence for the client.

    Attributes:
        kind: OpenAI's `type`, derived from the status.
        code: OpenAI's `code`, or None.
        param: the body field that caused the error, or None.
    """

    def __init__(
        self, status: int, sentence: str, code: Any = None, param: Any = None, headers: Any = None
    ):
        """Store the sentence as the error's `detail`. `headers` are added to the response."""
        super().__init__(status, replace_surrogates(sentence), headers)
        default_kind = "server_error" if status >= 500 else "invalid_request_error"
        self.kind = ERROR_TYPES.get(status, default_kind)
        self.code = code
        self.param = param


def prompt_too_long(why: str) -> ApiError:
    """Return an error whose code and opening words make agents shorten the conversation."""
    sentence = f"prompt is too long: {why}"
    return ApiError(400, sentence, code="context_length_exceeded", param="messages")


def as_api_error(error: BaseException, request_id: str) -> ApiError:
    """Convert an exception to an error for the client.

    An `ApiError` is returned unchanged. Other errors that the client caused get a 4xx status. Any other exception is
    logged with the request's id, and the client gets only the id.

    Args:
        error: the exception that ended the request.
        request_id: the request's id, which is also in the response headers.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        if error.body is None:
            return ApiError(400, "the body is empty or null: send a JSON object")
        first_error, *_ = error.errors()
        _, *location_in_body = first_error["loc"]  # FastAPI's location starts with "body"
        sentence = describe_error(first_error | {"loc": location_in_body}, error.body)
        return ApiError(400, sentence)
    if isinstance(error, HTTPException):
        cause = error.__cause__  # set if FastAPI could not read the body
        if cause is None:
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        # Python's JSON parser raises a plain ValueError only for integers with more digits than Python allows.
        has_long_integer = type(cause) is ValueError
        if has_long_integer:
            return ApiError(400, "the body has a number of too many digits")
        return as_api_error(cause, request_id)
    if isinstance(error, ClientDisconnect):
        return ApiError(499, "the client has disconnected")
    if isinstance(error, RecursionError):  # only deeply nested bodies cause this
        return ApiError(400, "the body is nested too deeply")
    if isinstance(error, UnicodeError):
        return ApiError(400, "the body is not UTF-8")
    if isinstance(error, NeverFits):
        return prompt_too_long(str(error))
    if isinstance(error, SnapKVError) and not isinstance(error, EntryFileError):
        option = error.option if isinstance(error, OptionError) else None
        return ApiError(400, str(error), param=option)
    return _server_error(error, request_id)


def _server_error(error: BaseException, request_id: str) -> ApiError:
    """Log an exception with the request's id, and return an error that contains only the id."""
    # An EntryFileError's message says what is wrong with the file, so a traceback would add nothing.
    if isinstance(error, EntryFileError):
        log.error("request %s failed: %s", request_id, error)
    else:
        log.error("request %s failed", request_id, exc_info=error)
    sentence = f"the server failed on this request; its log has the details under {request_id}"
    return ApiError(500, sentence, code="internal_error")
