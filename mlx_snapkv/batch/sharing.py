"""A request that rank 0 has read and checked, as the other ranks of a shared model are told of it."""

from __future__ import annotations

from typing import Any

from .openai_body import Body
from .openai_request import Asked, Defaults, processors_of, sampler_of

SAID = ("prompt", "max_tokens", "stop", "state", "tools", "chat", "ignored")
SAMPLING = set(Body.model_fields) - {"model", "stream"}


def told(body: Body, wanted: Asked, seed: int) -> dict[str, Any]:
    """What JSON can hold of a request; `seed` is what `asked` was given with the body."""
    sampling = body.model_dump(include=SAMPLING, exclude_unset=True)
    return {name: getattr(wanted, name) for name in SAID} | {"sampling": sampling, "seed": seed}


def heard(said: dict[str, Any], tokenizer, defaults: Defaults) -> Asked:
    """The request again."""
    body, size = Body.model_validate(said["sampling"]), len(tokenizer)
    return Asked(
        **{name: said[name] for name in SAID},
        sampler=sampler_of(body, tokenizer, defaults, size, said["seed"]),
        processors=processors_of(body, size),
    )
