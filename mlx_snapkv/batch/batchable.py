"""Which models and policies can decode in a batch."""

from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import members
from ..caches.memories import in_files
from ..engine.recalling import Recall
from ..errors import SnapKVError, UnsupportedModelError
from ..models import type_of
from ..policies import Policy, Stages

# Wrong, or an error, in mlx-lm's own batches too (0.32).
ALONE = ("gemma2", "gpt_bigcode", "llama4", "longcat_flash_ngram", "nemotron-nas")


def is_batchable(model) -> bool:
    """Whether mlx-lm can decode several prompts of this model together, and right."""
    caches = members(make_prompt_cache(model))
    return type_of(model) not in ALONE and all(hasattr(cache, "merge") for cache in caches)


def require_batchable(model, policy: Policy | Stages | None, recall: Recall) -> None:
    """Raises: SnapKVError: prompts of this model can't be decoded together, or not read so."""
    if recall.memory != "drop" and policy is not None and policy.reads_in_blocks:
        raise SnapKVError(
            f"memory={recall.memory} can't be combined with {policy} in a batch: give a policy that reads prompts in "
            "full, such as snapkv, or answer them one after the other"
        )
    if in_files(recall.memory):
        raise SnapKVError(
            f"memory={recall.memory} keeps files that requests of a batch can't share: give recall, recall:8bit or "
            "recall:4bit"
        )
    require_together(model)


def require_together(model) -> None:
    """Raises: SnapKVError: prompts of this model can't be decoded together, whatever their caches hold."""
    if not is_batchable(model):
        raise UnsupportedModelError(
            f"mlx-lm can't decode several prompts together with models of type {type_of(model)!r}: "
            "answer them one after the other"
        )
