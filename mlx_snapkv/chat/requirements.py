"""What a conversation can't do, told before it begins."""

import inspect
from typing import Any

from ..caches.layers import attention_layers
from ..caches.memories import make_caches
from ..caches.quantizable import require_quantizable
from ..engine.prefill import mlx_generate
from ..engine.retention import RetentionConfig
from ..engine.serving import require_no_conflict
from ..entries.quantization import taken_from
from ..errors import SnapKVError, UnknownOptionError, suggestion
from ..policies import Policy, Stages


def require_usable(
    model: Any,
    policy: Policy | Stages | None,
    retention: RetentionConfig,
    generation: dict[str, Any],
) -> None:
    """Raises: SnapKVError: policy, memory and the options of answers don't go together, or not with the model."""
    retention.require(model, policy)
    if policy is None:
        return
    _require_turns(policy)
    require_no_conflict(generation)
    layers = attention_layers(model, make_caches(model, retention.memory, policy))
    quantization, _ = taken_from(generation)
    if quantization is not None:
        require_quantizable(model, layers, quantization)


def _require_turns(policy: Policy | Stages) -> None:
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
