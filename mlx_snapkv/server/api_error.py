"""The errors that clients get, for all APIs."""

from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..batch.memory import NeverFits
from ..completions.validation import describe_error
from ..errors import EntryFileError, OptionError, SnapKVError
from .log import log

ERROR_TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An HTTP status and a sentence.

    Attributes:
        kind: OpenAI's `type`, which follows from the status.
        code: OpenAI's `code`; None if it is not set.
        param: the field of the body that the error is about; None if it is about no single field.
    """

    def __init__(
        self, status: int, sentence: str, code: Any = None, param: Any = None, headers: Any = None
    ):
        """Take the sentence as the error's `detail`; `headers` are added to the response."""
        super().__init__(status, sentence, headers)
        default_kind = "server_error" if status >= 500 else "invalid_request_error"
        self.kind = ERROR_TYPES.get(status, default_kind)
        self.code = code
        self.param = param


def prompt_too_long(why: str) -> ApiError:
    """Return an error by whose code or first words agents know that they must shorten the conversation."""
    sentence = f"prompt is too long: {why}"
    return ApiError(400, sentence, code="context_length_exceeded", param="messages")


def as_api_error(error: BaseException, request_id: str) -> ApiError:
    """Convert an exception to the error that the client gets.

    The client's own mistake becomes a 4xx. Any other exception is logged under the request's id, which the client gets.

    Args:
        error: the exception that ended the request.
        request_id: the id in the response's header.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        first, *_ = error.errors()
        location_in_body = first["loc"][1:]  # FastAPI's location begins with "body"
        return ApiError(400, describe_error(first | {"loc": location_in_body}, error.body))
    if isinstance(error, HTTPException):
        cause = error.__cause__
        if cause is None:
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        # FastAPI could not read the body.
        if type(cause) is ValueError:  # Python limits the digits of an integer
            return ApiError(400, "the body has a number of too many digits")
        return as_api_error(cause, request_id)
    if isinstance(error, ClientDisconnect):
        return ApiError(499, "the client has disconnected")
    if isinstance(error, RecursionError):  # only a client's body can be nested so deeply
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
    """Log an exception under the request's id, and return an error that tells the client only this id."""
    # An EntryFileError names the damaged file, so a traceback adds nothing.
    if isinstance(error, EntryFileError):
        log.error("request %s failed: %s", request_id, error)
    else:
        log.error("request %s failed", request_id, exc_info=error)
    sentence = f"the server failed on this request; its log has the details under {request_id}"
    return ApiError(500, sentence, code="internal_error")
