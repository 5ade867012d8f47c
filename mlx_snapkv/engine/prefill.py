"""Reads a prompt without answering it. mlx-lm can then decode an answer, or questions can follow later."""

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ..caches.layers import all_caches, layer_caches
from ..compress.policy import Policy
from ..errors import SnapKVError, UnknownOptionError, suggestion
from ..models.trained_length import warn_beyond_trained_length
from ..planning.config import CompressionConfig
from ..planning.prompt_plan import PREFILL_STEP_SIZE, ProgressCallback, require_step_size
from ..planning.request_plan import plan_request
from ..planning.settings import Setting
from ..sparse.options import Sparse
from ..sparse.prompt_caches import caches_to_save, make_caches
from .loop_model import observing_queries, split_at_evictions, with_pacing
from .report import CompressionReport
from .request import Request
from .restore import CacheCopy, restoring
from .token_ids import require_known_tokens, token_ids

# Import the module by name, because `mlx_lm.generate` is also a function.
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
    """Feed `tokens` to the model, and compress the prompt cache.

    To decode with mlx-lm directly, pass `prompt[:-1]` here, then pass `prompt[-1:]` and the cache to mlx-lm's
    `generate_step`, which needs at least one token. The policy then chooses entries without seeing the last token. If
    you pass the whole prompt here, the same entries are kept as in this package's `generate_step`. For a policy with
    `lookahead`, the next tokens are decoded greedily so that they can vote, and are then dropped.

    With `sparse`, all entries stay in a store, and later requests or conversation turns can continue from them.

    Args:
        model: an mlx-lm model.
        tokens: token ids, `(T,)`.
        policy: a policy object, or a string such as `"snapkv:top_k=1024"`.
        sparse: sparse attention instead of a policy; see `generate_step`.
        prompt_cache: the prompt cache to fill. A policy compresses it only if it is empty at first. With `sparse`, it
            may contain earlier turns. By default, a new one is created.
        prefill_step_size: maximum tokens per chunk. A policy's `prefill_chunk` takes precedence. With schedule="block",
            chunks have at most `block` tokens. With sparse prefill, chunks have 512 tokens.
        prompt_progress_callback: called with the number of tokens processed and the total.
        **options: `kv_bits` and `kv_group_size`, for the kept entries.

    Returns: The prompt cache and the report. If nothing was compressed, the report's `reason` says why.

    Raises:
        SnapKVError: `tokens` or an option is invalid, neither `policy` nor `sparse` is set, the model is not supported,
            attention produced NaN, or the disk is full.
    """
    config, kv_options = _prefill_config(options | {"policy": policy, "sparse": sparse})
    tokens = token_ids(tokens)
    require_known_tokens(tokens, model)
    require_step_size(prefill_step_size)
    warn_beyond_trained_length(model, tokens.size)
    plan = plan_request(model, config, tokens.size, prompt_cache)
    caches = make_caches(model, config.sparse) if prompt_cache is None else prompt_cache
    loop_options: dict[str, Any] = {
        "prefill_step_size": plan.chunk_size(prefill_step_size),
        "prompt_progress_callback": prompt_progress_callback,
    }
    if plan.is_left_to_mlx_lm:
        # Nothing is compressed, so mlx-lm quantises the entries itself.
        with observing_queries(model, caches):
            read(split_at_evictions(model, caches), tokens, caches, loop_options | kv_options)
        caches_after = caches_to_save(caches) if prompt_cache is None else caches
        report = CompressionReport.of_full_cache(plan)
    else:
        request = Request(model, plan, caches, uses_store=prompt_cache is None)
        with restoring(request.prompt_cache), request.recording():
            caches_after = _read_request(request, tokens, loop_options)
            report = request.report
    if prompt_cache is None:
        return caches_after, report
    prompt_cache[:] = caches_after
    return prompt_cache, report


def _prefill_config(options: dict[str, Any]) -> tuple[CompressionConfig, dict[str, Any]]:
    """Split the keyword arguments of `prefill` into a config and mlx-lm's quantisation options.

    Raises: SnapKVError: an option is unknown or invalid, options conflict, or neither a policy nor sparse attention is
        set.
    """
    config, kv_options = CompressionConfig.from_keywords(options, is_text=True)
    known_names = {"kv_bits", "kv_group_size"}
    for name in kv_options.keys() - known_names:
        advice = suggestion(name, known_names)
        raise UnknownOptionError(f"unknown option {name!r} of prefill{advice}")
    if config.setting is None:
        raise SnapKVError("prefill needs a policy, such as SnapKV(top_k=4096), or sparse=True")
    return config, kv_options


def _read_request(request: Request, tokens: mx.array, loop_options: dict[str, Any]) -> list:
    """Read a request's tokens, apply its policy if it has one, and return the caches to continue from."""
    plan = request.plan
    model = request.model["wrapped"]
    next_logprobs = read(request.model, tokens, request.caches, loop_options)
    if plan.sparse is not None:
        request.finish()
        return caches_to_save(request.prompt_cache)
    request.record_prefill_time()
    n_voting_answer_tokens = plan.voters.stop - tokens.size
    _decode_voters(model, request.caches, next_logprobs, n_voting_answer_tokens)
    request.compress()
    return request.prompt_cache


def read(model, tokens: mx.array, prompt_cache: list, options: dict) -> mx.array:
    """Feed `tokens` to mlx-lm's loop, and return the next token's log-probabilities `(1, vocab_size)`."""
    next_logprobs = []

    def sampler(logprobs: mx.array) -> mx.array:
        next_logprobs.append(logprobs)
        return mx.argmax(logprobs, axis=-1)

    start = with_pacing(partial(mlx_generate.generate_step, tokens))
    with mlx_generate.wired_limit(model, [mlx_generate.generation_stream]):
        # mlx-lm's loop samples the next token even with max_tokens=0.
        for _ in start(model, max_tokens=0, sampler=sampler, prompt_cache=prompt_cache, **options):
            raise AssertionError("mlx-lm yielded a token although max_tokens is 0")
    return next_logprobs[-1]


def _decode_voters(model, prompt_cache: list, next_logprobs: mx.array, n_tokens: int) -> None:
    """Decode `n_tokens` voting tokens greedily, starting from `next_logprobs`, then restore the full caches.

    Caches that evict are not restored: they keep the tokens' entries until compression drops them.
    """
    if n_tokens <= 0:
        return
    full_caches = [
        cache
        for cache, adapted in zip(all_caches(prompt_cache), layer_caches(prompt_cache))
        if not adapted.is_compressed
    ]
    caches_before = CacheCopy(full_caches)
    first_token = mx.argmax(next_logprobs, axis=-1)
    # mlx-lm's loop also feeds the last token it yields, so ask for one fewer.
    n_to_yield = n_tokens - 1
    for _ in mlx_generate.generate_step(
        first_token, model, max_tokens=n_to_yield, prompt_cache=prompt_cache
    ):
        pass
    caches_before.restore()
