"""The page for the person at the Mac: one static file that asks nobody but this server."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter, Response

from ..content_policy import content_policy

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
    allowed = {"connect_src": "'self'", "img_src": "data:", "frame_ancestors": "'none'"}
    return content_policy(html.decode(), **allowed)
