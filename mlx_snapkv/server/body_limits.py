"""Decompress request bodies, and limit their size."""

import zlib
from typing import Any

from starlette.types import Message, Receive

from .api_error import ApiError

ZLIB_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's `wbits` by Content-Encoding


def limit_body(receive: Receive, max_bytes: int, encoding: str = "") -> Receive:
    """Return an ASGI `receive` function that decompresses the body and limits its size.

    Args:
        receive: the server's `receive` function, which returns the body as sent.
        max_bytes: maximum size of the decompressed body in bytes.
        encoding: the request's `Content-Encoding` header.

    Raises:
        ApiError: the encoding is unknown. The returned function raises ApiError if the body is too large or can't be
            decompressed.
    """
    compression = _compression(encoding)
    decompressor = None if compression is None else zlib.decompressobj(ZLIB_WBITS[compression])
    n_received = 0  # decompressed bytes

    async def receive_limited() -> Message:
        nonlocal n_received
        message = await receive()
        body = message.get("body", b"")
        if decompressor is not None and message["type"] == "http.request":
            is_last = not message.get("more_body")
            # One byte more than the limit is enough to detect a body that is too large.
            max_part_bytes = max_bytes - n_received + 1
            try:
                body = _decompress(decompressor, body, max_part_bytes, is_last)
            except zlib.error:
                why = f"the body is not {compression}, as its Content-Encoding says"
                raise ApiError(400, why) from None
            message = {**message, "body": body}
        n_received += len(body)
        if n_received > max_bytes:
            why = f"the request's body is larger than {max_bytes} bytes"
            raise ApiError(413, why, code="request_too_large")
        return message

    return receive_limited


def _compression(encoding: str) -> str | None:
    """Return the name of the compression in a `Content-Encoding` header, or None if the body is not compressed.

    Raises: ApiError: the compression is not supported, or there is more than one.
    """
    names = encoding.replace(",", " ").lower().split()
    compressions = [name for name in names if name != "identity"]
    if len(compressions) > 1 or any(name not in ZLIB_WBITS for name in compressions):
        supported = ", ".join(ZLIB_WBITS)
        raise ApiError(
            415, f"the body has the encoding {encoding[:40]!r}: send it plain or as {supported}"
        )
    return compressions[0] if compressions else None


def _decompress(decompressor: Any, data: bytes, max_bytes: int, is_last: bool) -> bytes:
    """Decompress the next part of a body, up to `max_bytes`.

    Args:
        decompressor: zlib decompressor that has processed the earlier parts.
        data: the compressed part.
        max_bytes: maximum number of bytes to return.
        is_last: whether this is the body's last part.

    Raises: zlib.error: the data is malformed or ends too early.
    """
    body = decompressor.decompress(data, max_bytes)
    has_reached_limit = len(body) == max_bytes
    if is_last and not decompressor.eof and not has_reached_limit:
        raise zlib.error("the compressed data is cut")
    return body
