"""Reading a prompt on its own, for people who decode with mlx-lm directly, and whether one is to be compressed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.block import BlockKVCache
from ..caches.layers import attention_classes, attention_layers, members
from ..caches.self_evicting import SelfEvicting
from ..entries.quantization import taken_from
from ..errors import SnapKVError
from ..models import patch as capture
from ..policies import Policy, Stages, resolve_policy
from .compress import fits_reason
from .report import CompressionReport
from .request import PREFILL_STEP_SIZE, RecordedRequest, is_fresh
from .rewind import Rewind
from .split_calls import one_by_one

# mlx_lm re-exports a function under the module's own name.
mlx_generate = importlib.import_module("mlx_lm.generate")

ProgressCallback = Callable[[int, int], None]


def gate(
    policy: Policy | Stages, n_prompt: int, prompt_cache: list | None, max_tokens: int = 0
) -> str | None:
    """Why a request is left to mlx-lm as it is, or None if it is to be compressed.

    Args:
        max_tokens: tokens that will be generated, which a block policy keeps within the budget too; -1 is no end.

    Raises:
        SnapKVError: the prompt is empty.
    """
    if n_prompt == 0:
        raise SnapKVError("the prompt is empty: give at least one token")
    if prompt_cache is not None and not is_fresh(prompt_cache):
        return "the prompt cache already holds tokens; only a fresh one is compressed"
    if n_prompt < policy.min_ctx:
        return (
            f"the prompt's {n_prompt} tokens are below min_ctx={policy.min_ctx}; "
            "set min_ctx=0 to force compression"
        )
    _, answering = policy.stages
    rows = n_prompt if answering.last_token else n_prompt - 1  # at the time of the cut, at least
    stays = answering.schedule == "once" or (max_tokens >= 0 and policy.fits(rows + max_tokens))
    return fits_reason(rows, policy) if policy.fits(rows) and stays else None


def prefill(
    model,
    tokens: mx.array | Sequence[int],
    policy: Policy | Stages | str,
    *,
    prompt_cache: list | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: ProgressCallback | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
) -> tuple[list, CompressionReport]:
    """Feed all of `tokens` to the model and compress its prompt cache.

    For people who decode with mlx-lm directly: feed `prompt[:-1]` here and give `prompt[-1:]` and the cache
    to mlx-lm's `generate_step`. The last `obs_window` of these tokens vote, and with `lookahead=n`
    the next `n` greedy tokens too, which are taken back before the cut.

    Args:
        tokens: `(T,)` token ids.
        policy: a policy object, or a string such as `"snapkv:top_k=1024"`.
        prompt_cache: an empty cache of the model to fill; by default a new one.
        prefill_step_size: tokens a chunk at most, unless the policy's `prefill_chunk` says otherwise.
        prompt_progress_callback: called with the tokens processed and their total.
        kv_bits, kv_group_size: of the cache's rows, if they are to be quantised; mlx-lm quantises those of a
            prompt that is not compressed.

    Returns:
        The prompt cache and the report, whose `reason` is set if the cache was not compressed.

    Raises:
        SnapKVError: `tokens` is empty, the policy can't be read, the model is not supported, its rows can't be
            quantised so, or its attention gave NaN.
    """
    chosen = resolve_policy(policy=policy)
    if chosen is None:
        raise SnapKVError("prefill needs a policy, such as SnapKV(top_k=4096)")
    policy = chosen
    tokens = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens))
    if tokens.ndim != 1:
        raise SnapKVError(f"the prompt must be one sequence of tokens, got shape {tokens.shape}")
    cache = make_prompt_cache(model) if prompt_cache is None else prompt_cache
    reading, answering = policy.stages
    options = {
        "prefill_step_size": reading.prefill_chunk or prefill_step_size,
        "prompt_progress_callback": prompt_progress_callback,
    }
    quantised = {"kv_bits": kv_bits, "kv_group_size": kv_group_size}
    reason = gate(policy, tokens.size, cache)
    if reason is not None:
        with observing(model, cache):
            read(one_by_one(model, cache), tokens, cache, options | quantised)
        return cache, CompressionReport(str(policy), tokens.size, reason)
    lookahead = answering.n_lookahead
    last = tokens.size + lookahead
    quantization, _ = taken_from(quantised)
    request = RecordedRequest(model, policy, tokens.size, cache, last, quantization)
    options["prefill_step_size"] = request.step_size(prefill_step_size)
    with request.recording():
        following = read(model, tokens, request.caches, options)
        request.prompt_is_read()
        if lookahead:
            _look_ahead(model, request, following, lookahead)
        report = request.cut()
    return cache, report


def read(model, tokens: mx.array, prompt_cache: list, options: dict) -> mx.array:
    """Feed `tokens` in chunks by mlx-lm's loop; the greedy token that follows them, `(1,)`."""
    following = []

    def sampler(logprobs: mx.array) -> mx.array:
        following.append(mx.argmax(logprobs, axis=-1))
        return following[-1]

    for _ in mlx_generate.generate_step(
        tokens, model, max_tokens=0, sampler=sampler, prompt_cache=prompt_cache, **options
    ):
        raise AssertionError("mlx-lm yielded a token of a request for none")
    return following[-1]


def _look_ahead(model, request: RecordedRequest, following: mx.array, n: int) -> None:
    """Decode `n` tokens on the full rows so that their queries are recorded, then take them back."""
    for cache in members(request.caches):
        if isinstance(cache, BlockKVCache):
            cache.make_room(n)
    before = Rewind(request.caches)
    # The loop feeds the token it is given and each one it yields.
    for _ in mlx_generate.generate_step(
        following, model, max_tokens=n - 1, prompt_cache=request.caches
    ):
        pass
    before.restore()


def observes(prompt_cache: list) -> bool:
    """Whether caches evict by themselves and ask for queries."""
    caches = (c for c in members(prompt_cache) if isinstance(c, SelfEvicting))
    return any(c.policy.observes_answer for c in caches)


def observing(model, prompt_cache: list) -> contextlib.AbstractContextManager[None]:
    """Patch the model's attention classes for the block if caches that evict ask for queries."""
    if not observes(prompt_cache):
        return contextlib.nullcontext()
    return capture.recording(attention_classes(attention_layers(model, prompt_cache)))
