"""What a conversation can't do, told before it begins."""

import inspect
from typing import Any

from ..engine.prefill import mlx_generate
from ..errors import SnapKVError, UnknownOptionError
from ..policies import Policy, Stages
from ..policies.base import suggestion


def require_turns(policy: Policy | Stages) -> None:
    """Raises: SnapKVError: the policy chooses from a prompt as a whole, and a turn is but a part of one."""
    _, decode_policy = policy.stages
    if decode_policy.repeats is not None:
        raise SnapKVError(
            f"{decode_policy.name} reads a prompt again as a whole, and a conversation's turns are only parts of one: "
            "save the text by cache-prompt and ask by generate --prompt-cache-file, or take another policy"
        )


def require_known(generation: dict[str, Any]) -> None:
    """Raises: UnknownOptionError: mlx-lm knows no such option of an answer."""
    found = inspect.signature(mlx_generate.generate_step).parameters.values()
    own = ("prompt_cache", "input_embeddings")  # the conversation's to give
    known = {p.name for p in found if p.kind is p.KEYWORD_ONLY and p.name not in own}
    for name in generation:
        if name not in known:
            close = suggestion(name, known)
            raise UnknownOptionError(
                f"unknown option {name!r} of a conversation{close}; known: {', '.join(sorted(known))}"
            )
