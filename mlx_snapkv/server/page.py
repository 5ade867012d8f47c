"""The page for the person at the Mac: one static file that asks nobody but this server."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Response

PAGE = Path(__file__).with_name("page.html")

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> Response:
    """The page; what it asks of the API needs the key, if the server has one."""
    html = _html()
    headers = {
        "Content-Security-Policy": _allowed(html),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(html, media_type="text/html", headers=headers)


@cache
def _html() -> bytes:
    return PAGE.read_bytes()


@cache
def _allowed(html: bytes) -> str:
    """A Content-Security-Policy: the file's own script and style by their hashes, and this server to ask."""
    rules = {"default-src": "'none'", "connect-src": "'self'", "img-src": "data:"}
    rules |= {"base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'"}
    for tag, text in re.findall(rb"<(script|style)>(.*?)</\1>", html, re.S):
        rules[f"{tag.decode()}-src"] = f"'sha256-{b64encode(sha256(text).digest()).decode()}'"
    return "; ".join(f"{name} {value}" for name, value in rules.items())
