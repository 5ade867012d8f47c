"""What `batch` and `serve` do alike: a model for other people's requests, and how its batches are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .generation import adapt_tokenizer, make_sampler
from .loading import load_model
from .options import n_bytes

if TYPE_CHECKING:
    from ..batch.openai_request import Defaults
    from ..engine.recalling import Recall
    from ..policies import Policy, Stages


def load_for_requests(
    model: str,
    adapter_path: str | None,
    defaults: Defaults,
    *,
    trust_remote_code: bool,
    quantize_activations: bool,
    extra_eos_token: Sequence[str] | None,
    chat_template_config: str | None,
    pipeline: bool | None = None,
) -> tuple[Any, Any]:
    """A model and its tokenizer; SnapKVError if the defaults of sampling are wrong for it."""
    loaded, tokenizer = load_model(
        model,
        adapter_path,
        trust_remote_code,
        quantize_activations=quantize_activations,
        pipeline=pipeline,
    )
    adapt_tokenizer(tokenizer, extra_eos_token, chat_template_config)
    make_sampler(tokenizer, **defaults.sampling)  # which finds mistakes
    return loaded, tokenizer


def batch_options(
    policy: Policy | Stages | None,
    prefill_step_size: int,
    kv_bits: int | None,
    kv_group_size: int,
    recall: Recall,
) -> dict[str, Any]:
    """Options of a `CompressedBatchGenerator`."""
    options: dict[str, Any] = {"policy": policy, "prefill_step_size": prefill_step_size}
    options |= {"memory": recall.memory, "far": recall.far}
    options |= {"verify": recall.verify, "verify_below": recall.below}
    quantised = {} if kv_bits is None else {"kv_bits": kv_bits, "kv_group_size": kv_group_size}
    return options | quantised


def most_kv_bytes(text: str | None) -> int | None:
    """What --max-kv-bytes says; None is no limit."""
    return None if text is None else n_bytes("--max-kv-bytes", text)
