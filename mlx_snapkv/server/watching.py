"""For those who watch the server: is it alive, and what does it do."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

router = APIRouter(tags=["watching"])


@router.get("/health")
async def health(request: Request) -> Response:
    """200 as long as the thread that generates is alive."""
    alive = request.app.state.engine.is_healthy
    return JSONResponse({"status": "ok" if alive else "unavailable"}, 200 if alive else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    return Response(request.app.state.engine.metrics.text(), media_type="text/plain; version=0.0.4")
