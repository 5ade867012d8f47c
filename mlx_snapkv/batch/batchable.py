"""Which models and policies can decode in a batch."""

from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import members
from ..errors import UnsupportedModelError
from ..models import type_of

# Wrong, or an error, in mlx-lm's own batches too (0.32).
ALONE = ("gpt_bigcode", "llama4", "nemotron-nas")


def require_batchable(model) -> None:
    """Raises: SnapKVError: prompts of this model can't be decoded together."""
    caches = list(members(make_prompt_cache(model)))
    if type_of(model) in ALONE or not all(hasattr(cache, "merge") for cache in caches):
        raise UnsupportedModelError(
            f"mlx-lm can't decode several prompts together with models of type {type_of(model)!r}: "
            "answer them one after the other"
        )


def require_together(model) -> None:
    """The same, of full caches in mlx-lm's own batch.

    Raises: SnapKVError: prompts of this model can't be decoded together.
    """
    caches = list(members(make_prompt_cache(model)))
    if type_of(model) in ALONE or not all(hasattr(cache, "merge") for cache in caches):
        raise UnsupportedModelError(
            f"mlx-lm can't decode several prompts together with models of type {type_of(model)!r}: "
            "answer them one after the other"
        )
