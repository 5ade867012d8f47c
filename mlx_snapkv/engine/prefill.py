"""Reading a prompt on its own, for people who decode with mlx-lm directly."""

import contextlib
import importlib
from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import layer_caches
from ..caches.matching import adopt
from ..entries.quantization import taken_from
from ..errors import SnapKVError
from ..models import attention_classes
from ..models.patch import recording
from ..policies import Policy, Stages, resolve_policy
from .decision import PREFILL_STEP_SIZE, ProgressCallback, gate
from .far import require_far
from .making import make_request
from .recalling import Recall
from .report import CompressionReport
from .rewind import Rewind
from .split_calls import one_by_one

# mlx_lm re-exports a function under the module's own name.
mlx_generate = importlib.import_module("mlx_lm.generate")


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
    far: str | None = None,
) -> tuple[list, CompressionReport]:
    """Feed all of `tokens` to the model and compress its prompt cache.

    For people who decode with mlx-lm directly: feed `prompt[:-1]` here and give `prompt[-1:]` and the cache
    to mlx-lm's `generate_step`. Of a prompt given whole, the entries kept are those that our `generate_step` keeps: the
    next tokens that vote (`lookahead`) are decoded, greedily, and taken back.

    Args:
        tokens: `(T,)` token ids.
        policy: a policy object, or a string such as `"snapkv:top_k=1024"`.
        prompt_cache: an empty cache of the model to fill; by default a new one.
        prefill_step_size: tokens a chunk at most; a policy's `prefill_chunk`, or its `block` where entries are evicted
            while the prompt is read, goes before it.
        prompt_progress_callback: called with the tokens processed and their total.
        kv_bits, kv_group_size: of the cache's entries, if they are to be quantised; mlx-lm quantises those of a
            prompt that is not compressed.
        far: what becomes of entries farther away than the model was trained to; see `generate_step`.

    Returns:
        The prompt cache and the report, whose `reason` is set if the cache was not compressed.

    Raises:
        SnapKVError: `tokens` is empty, the policy can't be read, the model is not supported, its entries can't be
            quantised so, or its attention gave NaN.
    """
    chosen = resolve_policy(policy=policy)
    if chosen is None:
        raise SnapKVError("prefill needs a policy, such as SnapKV(top_k=4096)")
    tokens = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens))
    if tokens.ndim != 1:
        raise SnapKVError(f"the prompt must be one sequence of tokens, got shape {tokens.shape}")
    cache = make_prompt_cache(model) if prompt_cache is None else prompt_cache
    options = {
        "prefill_step_size": prefill_step_size,
        "prompt_progress_callback": prompt_progress_callback,
    }
    quantised = {"kv_bits": kv_bits, "kv_group_size": kv_group_size}
    recall = Recall(far=far)
    require_far(model, chosen, recall)
    reason = gate(chosen, tokens.size, cache)
    if reason is not None:
        with observing(model, cache):
            read(one_by_one(model, cache), tokens, cache, options | quantised)
        return cache, CompressionReport(str(chosen), tokens.size, reason)
    quantization, _ = taken_from(quantised)
    request = make_request(model, chosen, tokens.size, cache, quantization, recall)
    options["prefill_step_size"] = request.step_size(prefill_step_size)
    options["prompt_progress_callback"] = request.progress(prompt_progress_callback)
    with request.recording():
        following = read(request.loop_model, tokens, request.caches, options)
        request.prompt_is_read()
        n = request.decision.last - tokens.size
        if n > 0:
            look_ahead(model, request.caches, mx.argmax(following, axis=-1), n)
        report = request.compress()
    return cache, report


def read(model, tokens: mx.array, prompt_cache: list, options: dict) -> mx.array:
    """Feed `tokens` in chunks by mlx-lm's loop; the log-probabilities `(1, vocab_size)` of the token after them."""
    following = []

    def sampler(logprobs: mx.array) -> mx.array:
        following.append(logprobs)
        return mx.argmax(logprobs, axis=-1)

    for _ in mlx_generate.generate_step(
        tokens, model, max_tokens=0, sampler=sampler, prompt_cache=prompt_cache, **options
    ):
        raise AssertionError("mlx-lm yielded a token of a request for none")
    return following[-1]


def look_ahead(model, prompt_cache: list, following: mx.array, n: int) -> None:
    """Decode `n` tokens from `following` on, so that their queries are recorded, then take them back."""
    before = Rewind(prompt_cache)
    # The loop feeds the token it is given and each one it yields.
    for _ in mlx_generate.generate_step(
        following, model, max_tokens=n - 1, prompt_cache=prompt_cache
    ):
        pass
    before.restore()


def observing(model, prompt_cache: list) -> contextlib.AbstractContextManager[None]:
    """Patch the model's attention classes for the block if caches ask for the queries of what they are fed."""
    adopt(prompt_cache, model)  # those that mlx-lm has loaded from a file don't know their layers
    observed = any(cache.observes for cache in layer_caches(prompt_cache))
    return recording(attention_classes(model) if observed else [])
