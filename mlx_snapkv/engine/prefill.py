"""Reading a prompt without an answer: for decoding with mlx-lm directly, or for later questions about a text."""

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ..caches.layers import layer_caches, members
from ..compress.policy import Policy
from ..errors import SnapKVError, UnknownOptionError, suggestion
from ..models.trained_length import warn_beyond_trained_length
from ..planning.config import CompressionConfig
from ..planning.options import OPTIONS
from ..planning.prompt_plan import PREFILL_STEP_SIZE, ProgressCallback, require_step_size
from ..planning.request_plan import plan_request
from ..planning.settings import Setting
from ..sparse.options import Sparse
from ..sparse.prompt_caches import lasting_forms, make_caches, saved_forms
from .loop_model import observing, one_by_one, pacing
from .report import CompressionReport
from .request import Request, make_request
from .restore import CacheCopy
from .token_ids import require_known, token_ids

# mlx_lm re-exports a function under the module's own name.
mlx_generate = importlib.import_module("mlx_lm.generate")


def prefill(
    model,
    tokens: mx.array | Sequence[int],
    policy: Policy | Setting | str | None = None,
    *,
    sparse: Sparse | dict[str, Any] | str | bool | None = None,
    prompt_cache: list | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: ProgressCallback | None = None,
    **options: Any,
) -> tuple[list, CompressionReport]:
    """Feed all of `tokens` to the model and compress its prompt cache.

    To decode with mlx-lm directly, feed `prompt[:-1]` here and give `prompt[-1:]` and the cache to mlx-lm's
    `generate_step`. A prompt that is given whole keeps the same entries as in our `generate_step`: the next tokens that
    vote (`lookahead`) are decoded greedily, and only their votes remain.

    With `sparse`, a text is read for later questions: all entries stay in the `store`, and later requests and turns of
    a conversation continue from them.

    Args:
        model: an mlx-lm model.
        tokens: `(T,)` token ids.
        policy: a policy object, or a string such as `"snapkv:top_k=1024"`.
        sparse: sparse attention instead of a policy; see `generate_step`.
        prompt_cache: an empty cache of the model to fill; by default a new one.
        prefill_step_size: tokens a chunk at most; a policy's `prefill_chunk` or `block` takes precedence.
        prompt_progress_callback: called with the tokens processed and their total.
        **options: the options of `RequestOptions`, and `kv_bits` and `kv_group_size` for the entries kept.

    Returns: The prompt cache and the report, whose `reason` is set if the cache was not compressed.

    Raises:
        SnapKVError: `tokens` is empty, the policy can't be read, the model can't be served so, or its attention gave
            NaN.
    """
    method = {"policy": policy, "sparse": sparse}
    config, quantised = CompressionConfig.from_keywords(options | method, is_text=True)
    for name in quantised.keys() - {"kv_bits", "kv_group_size"}:
        raise UnknownOptionError(f"unknown option {name!r} of prefill{suggestion(name, OPTIONS)}")
    if config.setting is None:
        raise SnapKVError("prefill needs a policy, such as SnapKV(top_k=4096), or sparse=True")
    tokens = token_ids(tokens)
    require_known(tokens, model)
    require_step_size(prefill_step_size)
    warn_beyond_trained_length(model, tokens.size)
    plan = plan_request(model, config, tokens.size, prompt_cache)
    cache = prompt_cache
    if cache is None:
        cache = make_caches(model, config.store, config.store_dir)
    loop_options: dict[str, Any] = {
        "prefill_step_size": plan.chunk_size(prefill_step_size),
        "prompt_progress_callback": prompt_progress_callback,
    }
    if plan.reason is not None:
        # mlx-lm quantises the entries as they come.
        with observing(model, cache):
            read(one_by_one(model, cache), tokens, cache, loop_options | quantised)
        caches_after = saved_forms(model, cache) if prompt_cache is None else cache
        report = CompressionReport.of_full_cache(plan)
    else:
        request = make_request(model, plan, cache, owned=prompt_cache is None)
        with request.recording():
            caches_after = _prefilled(request, tokens, loop_options)
            report = request.report
    if prompt_cache is None:
        return caches_after, report
    prompt_cache[:] = caches_after
    return prompt_cache, report


def _prefilled(request: Request, tokens: mx.array, loop_options: dict[str, Any]) -> list:
    """Read the tokens of a request, compress if a policy does, and return the caches to continue with."""
    plan = request.plan
    model = request.model["wrapped"]
    following = read(request.model, tokens, request.caches, loop_options)
    if plan.sparse is not None:
        request.end()
        if plan.adapts:
            request.remember()
        return lasting_forms(model, request.prompt_cache, plan.options.store)
    request.prompt_is_read()
    _look_ahead(model, request.caches, following, plan.last - tokens.size)
    request.compress()
    return request.prompt_cache


def read(model, tokens: mx.array, prompt_cache: list, options: dict) -> mx.array:
    """Feed `tokens` in chunks by mlx-lm's loop, and return the next token's log-probabilities `(1, vocab_size)`."""
    following = []

    def sampler(logprobs: mx.array) -> mx.array:
        following.append(logprobs)
        return mx.argmax(logprobs, axis=-1)

    start = pacing(partial(mlx_generate.generate_step, tokens))
    with mlx_generate.wired_limit(model, [mlx_generate.generation_stream]):
        for _ in start(model, max_tokens=0, sampler=sampler, prompt_cache=prompt_cache, **options):
            raise AssertionError("mlx-lm yielded a token of a request for none")
    return following[-1]


def _look_ahead(model, prompt_cache: list, following: mx.array, n: int) -> None:
    """Decode `n` tokens after the log-probabilities `following`, which vote, and restore the caches that only grow.

    A cache that evicts keeps the tokens' entries until the compression, which drops entries after the text.
    """
    if n <= 0:
        return
    pairs = zip(members(prompt_cache), layer_caches(prompt_cache))
    before = CacheCopy([cache for cache, ours in pairs if not ours.is_compressed])
    token = mx.argmax(following, axis=-1)
    # The loop feeds the token it is given and each one it yields.
    list(mlx_generate.generate_step(token, model, max_tokens=n - 1, prompt_cache=prompt_cache))
    before.restore()
