"""Tokenizer, sampler and cache as mlx-lm's flags ask for them."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import SnapKVError, UnsupportedModelError

if TYPE_CHECKING:
    from ..entries.quantization import Quantization

# Of the template's own parameters, those that may be given beside its free ones.
TEMPLATE_OPTIONS = {"tools", "documents", "chat_template"}


def adapt_tokenizer(
    tokenizer, extra_eos_token: Sequence[str] | None, chat_template_config: str | None
) -> None:
    """Add tokens that end an answer, and options for the chat template.

    Raises:
        SnapKVError: the tokenizer has no such token, or the options are no JSON object.
    """
    for token in extra_eos_token or []:
        if not _has_token(tokenizer, token):
            raise SnapKVError(f"--extra-eos-token {token!r}: this tokenizer has no such token")
        tokenizer.add_eos_token(token)
    if chat_template_config is not None:
        options = _template_options(tokenizer, chat_template_config)
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **options)


def seed_sampling(seed: int | None) -> None:
    import mlx.core as mx

    if seed is not None:
        mx.random.seed(seed)


def make_sampler(tokenizer, *, top_k: int, min_tokens_to_keep: int, **options: Any) -> Callable:
    """mlx-lm's sampler with these options; SnapKVError if one is beyond the vocabulary."""
    from mlx_lm import sample_utils

    size = len(tokenizer)
    for name, given in (("--top-k", top_k), ("--min-tokens-to-keep", min_tokens_to_keep)):
        if given >= size:
            raise SnapKVError(f"{name} must be below the vocabulary's {size}, got {given}")
    return sample_utils.make_sampler(
        top_k=top_k,
        min_tokens_to_keep=min_tokens_to_keep,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
        **options,
    )


def require_quantization(model, quantization: Quantization | None) -> None:
    """Raises: SnapKVError: a model's entries can't be quantised so, found out before anything is read."""
    from mlx_lm.models.cache import make_prompt_cache

    from ..caches.layers import attention_layers
    from ..caches.quantizable import require_quantizable

    if quantization is None:
        return
    try:
        layers = attention_layers(model, make_prompt_cache(model))
    except UnsupportedModelError:  # whose entries are mlx-lm's alone
        return
    require_quantizable(model, layers, quantization)


def require_rotating(
    model, max_kv_size: int | None, *, kv_bits: int | None = None, draft_model: str | None = None
) -> None:
    """Raises: SnapKVError: `--max-kv-size` is given, and mlx-lm would pass over it, or over what is given beside it."""
    from ..models import type_of

    if max_kv_size is None:
        return
    if hasattr(model, "make_cache"):
        raise SnapKVError(
            f"--max-kv-size has no effect on {type_of(model)} models, since they make their own caches: drop it, or "
            f"limit the entries with --policy streaming_llm:budget={max_kv_size}"
        )
    if draft_model is not None:
        raise SnapKVError("--max-kv-size has no effect beside --draft-model: drop one of them")
    if kv_bits is not None:
        raise SnapKVError("--kv-bits can't quantise the cache of --max-kv-size: drop one of them")


def _has_token(tokenizer, token: str) -> bool:
    if token.isdecimal():
        return int(token) < len(tokenizer)
    found = tokenizer.convert_tokens_to_ids(token)
    return found is not None and (found != tokenizer.unk_token_id or token == tokenizer.unk_token)


def _template_options(tokenizer, text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise SnapKVError(
            "--chat-template-config must be a JSON object, "
            f"such as '{{\"enable_thinking\": false}}', got {text!r}"
        )
    own = inspect.signature(tokenizer._tokenizer.apply_chat_template).parameters
    for name in options:
        if name in own and name not in TEMPLATE_OPTIONS:
            raise SnapKVError(f"--chat-template-config can't set {name!r}: the command does")
    return options
