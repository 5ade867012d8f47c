"""`/v1/models`: the served model, with the fields that OpenAI's and Anthropic's clients read."""

from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter, Request

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the served model, once for each of its names."""
    names = request.app.state.engine.loaded.names
    data = [_model(name, request) for name in names]
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": data, **page}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """Describe the served model. Any name is accepted."""
    return _model(name, request)


def _model(name: str, request: Request) -> dict[str, Any]:
    """Return a description of the served model under the given name. The context length is null if unknown."""
    created: int = request.app.state.created
    context = request.app.state.engine.context
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "mlx-snapkv",
        # Anthropic's fields.
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": context,
        # Names that other servers use for the context length.
        "context_length": context,
        "max_model_len": context,
    }
