"""Which models can decode in a batch."""

from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import members
from ..errors import UnsupportedModelError
from ..models import type_of

# Wrong, or an error, in mlx-lm's own batches too (0.32).
ALONE = ("gemma2", "gpt_bigcode", "llama4", "longcat_flash_ngram", "nemotron-nas")


def is_batchable(model) -> bool:
    """Whether mlx-lm can decode several prompts of this model together, and right."""
    caches = members(make_prompt_cache(model))
    return type_of(model) not in ALONE and all(hasattr(cache, "merge") for cache in caches)


def require_together(model) -> None:
    """Raises: SnapKVError: prompts of this model can't be decoded together, whatever their caches hold."""
    if not is_batchable(model):
        raise UnsupportedModelError(
            f"mlx-lm can't decode several prompts together with models of type {type_of(model)!r}: "
            "answer them one after the other"
        )
