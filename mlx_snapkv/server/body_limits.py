"""Decompressing the body of a request, and limiting its size."""

import zlib

from starlette.types import Message, Receive

from .api_error import ApiError

ZLIB_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's `wbits` for each Content-Encoding


def limit_body(receive: Receive, limit: int, encoding: str = "") -> Receive:
    """Return an ASGI `receive` function that decompresses the body.

    Args:
        receive: the server's function, which returns the body as it was sent.
        limit: number of bytes that the decompressed body may have.
        encoding: the request's `Content-Encoding` header.

    Raises:
        ApiError: the encoding is unknown. The returned function raises it if the body is too large, or if it does not
            have this encoding.
    """
    names = [name for name in encoding.replace(",", " ").lower().split() if name != "identity"]
    if len(names) > 1 or any(name not in ZLIB_WBITS for name in names):
        encodings = ", ".join(ZLIB_WBITS)
        raise ApiError(
            415, f"the body has the encoding {encoding[:40]!r}: send it plain or as {encodings}"
        )
    unpack = zlib.decompressobj(ZLIB_WBITS[names[0]]) if names else None
    n_received = 0

    async def received() -> Message:
        nonlocal n_received
        message = await receive()
        body = message.get("body", b"")
        if unpack is not None and message["type"] == "http.request":
            try:
                body = unpack.decompress(body, limit - n_received + 1)
                ended = unpack.eof or message.get("more_body") or len(body) > limit - n_received
            except zlib.error:
                ended = False
            if not ended:
                raise ApiError(400, f"the body is not {names[0]}, as its Content-Encoding says")
            message = {**message, "body": body}
        n_received += len(body)
        if n_received > limit:
            why = f"the request's body is larger than {limit} bytes"
            raise ApiError(413, why, code="request_too_large")
        return message

    return received
