"""Prompts longer than a model was trained to: whether its keys are pulled together, or keep their positions."""

from typing import Any

from ..caches.compaction import Compaction
from ..caches.layers import AttentionLayer, attention_layers
from ..caches.memories import make_caches
from ..caches.quantizable import head_sizes
from ..errors import SnapKVError
from ..models import type_of
from ..models.rope import trained_length
from ..policies import Policy, Stages
from .recalling import Recall


def require_far(model, policy: Policy | Stages | None, recall: Recall) -> None:
    """Raises: SnapKVError: `recall.far` is "pull", and that can't be done with this model or policy."""
    if recall.far == "pull":
        why = _problem(model, policy, recall)
        if why is not None:
            raise SnapKVError(f"far=pull {why}")


def pull_for(
    model, policy: Policy | Stages | None, recall: Recall, n_prompt: int
) -> Compaction | None:
    """How near a prompt's tokens are brought to each other; None leaves them where they are.

    Unless `recall.far` says it, that is done for prompts longer than the model was trained to, where it is possible.
    """
    length = trained_length(model)
    longer = length is not None and n_prompt > length
    wanted = longer if recall.far is None else recall.far == "pull"
    if not wanted or length is None or _problem(model, policy, recall) is not None:
        return None
    return Compaction(length)


def beyond(model, policy: Policy | Stages | None, recall: Recall, n_prompt: int) -> str | None:
    """A sentence, if a prompt is longer than the model was trained to, and nothing is done about it."""
    length = trained_length(model)
    if length is None or n_prompt <= length or recall.far is not None:
        return None
    if pull_for(model, policy, recall, n_prompt) is not None:
        return None
    said = f"{n_prompt} tokens are more than the {length} that this model was trained to read: answers may be wrong"
    if policy is not None and policy.reads_in_blocks:
        return said
    return f"{said}; a policy that evicts while it reads, such as keydiff:budget=4096, brings them nearer"


def _problem(model, policy: Policy | Stages | None, recall: Recall) -> str | None:
    """Why nothing can be pulled together, as the rest of a sentence."""
    if policy is None or not policy.reads_in_blocks:
        what = "there is none" if policy is None else f"{policy} reads all of a prompt first"
        return f"needs a policy that evicts while a prompt is read, such as keydiff, and {what}"
    if recall.verify == "all":
        return "can't be combined with verify=all, which reads all entries where they are: leave verify out"
    length = trained_length(model)
    if length is None:
        return (
            f"needs to know the length that the model was trained to, and mlx-lm's {type_of(model)!r} has no "
            "max_position_embeddings"
        )
    layers = attention_layers(model, make_caches(model, "drop"))
    turning = [layer for layer in layers if layer.rope is not None]
    if not turning:
        return f"turns keys on, and the full-attention layers of model type {type_of(model)!r} have no RoPE"
    if not _all_turn(model, turning, length):
        return f"turns keys on, and those of model type {type_of(model)!r} can't be turned twice"
    return None


def _all_turn(model, layers: list[AttentionLayer], length: int) -> bool:
    sizes = head_sizes(model, layers)
    ropes: dict[Any, AttentionLayer] = {id(layer.rope): layer for layer in layers}
    return all(
        layer.family.can_turn(layer.attention, layer.rope, max(sizes), length)
        for layer in ropes.values()
    )
