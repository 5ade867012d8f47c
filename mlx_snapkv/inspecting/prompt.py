"""`inspect_prompt`: a prompt compressed and answered, with everything told about it."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.layers import attention_layers
from ..caches.recording import RecordingKVCache
from ..engine.decision import PREFILL_STEP_SIZE, ProgressCallback, decide
from ..engine.generate import encode_prompt
from ..engine.prefill import mlx_generate
from ..engine.recalling import Recall
from ..engine.report import CompressionReport
from ..engine.serving import MAX_TOKENS, served
from ..errors import SnapKVError
from ..models import attention_classes
from ..models.patch import listening
from ..policies import Policy, SnapKV, Stages, resolve_policy
from .inspection import Inspection
from .sentences import Sentence, ranked
from .spans import special_tokens, token_spans
from .watching import Watcher


def inspect_prompt(
    model: Any,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = MAX_TOKENS,
    *,
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Policy | Stages | str | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: ProgressCallback | None = None,
) -> Inspection:
    """Answer a prompt as `generate` does, greedily, and tell what was kept of it and where the answer looked.

    The weights are those of the attention's own queries and entries, taken when it was called. To know them takes time:
    an answer is decoded several times more slowly.

    Args:
        prompt: a text, to which no chat template is applied, or token ids, as of `stream_generate`.
        max_tokens: of the answer, at most.
        snapkv, policy: as of `stream_generate`; without either, or below the policy's `min_ctx`, nothing is dropped.
        prefill_step_size, prompt_progress_callback: as of `prefill`.

    Raises:
        SnapKVError: the prompt or the answer is to be empty, the policy can't be read, or the model is not supported.
    """
    chosen = resolve_policy(snapkv, policy)
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    tokens = encode_prompt(tokenizer, prompt)
    if tokens.ndim != 1 or tokens.size == 0:
        raise SnapKVError(f"the prompt must be one sequence of tokens, got shape {tokens.shape}")
    if max_tokens < 1:
        raise SnapKVError(f"max_tokens must be at least 1, got {max_tokens}")
    caches = make_prompt_cache(model)
    layers = attention_layers(model, caches)
    for layer in layers:
        # One that records nothing, but can be listened to where nothing is dropped.
        layer.put(caches, RecordingKVCache(0, 0, tokens.size + max_tokens + 1, layer))
    watcher = Watcher(layers, tokens.size, max_tokens)
    reports: list[CompressionReport] = []

    def on_report(report: CompressionReport) -> None:
        reports.append(report)
        if report.compressed:
            watcher.is_compressed()

    given = {"tokenizer": tokenizer, "prompt": tokens, "max_tokens": max_tokens}
    options = {
        "prompt_cache": caches,
        "prefill_step_size": prefill_step_size,
        "prompt_progress_callback": prompt_progress_callback,
    }
    start = functools.partial(mlx_generate.stream_generate, **given)
    wanted = model, tokens.size, max_tokens, chosen, Recall(), on_report, options
    responses = []
    with listening(attention_classes(model), watcher.hear):
        for response in served(start, *wanted, on_kept=watcher.on_kept):
            watcher.take_down()
            responses.append(response)
    prompt_ids: list[int] = tokens.tolist()  # type: ignore[assignment]
    said = [r.token for r in responses if r.finish_reason != "stop"]
    whole, spans = token_spans(tokenizer, prompt_ids + said)
    n, end = len(prompt_ids), spans[tokens.size - 1][1]
    heads = [watcher.heads[layer.number] for layer in layers]
    sentences: tuple[Sentence, ...] = ()
    if watcher.kept and chosen is not None:
        special = np.isin(prompt_ids, sorted(special_tokens(tokenizer)))
        counts = _counts(watcher, heads, chosen, n)
        sentences = ranked(whole[:end], spans[:n], special, counts, bool(watcher.votes))
    indices = tuple(layer.index for layer in layers)
    return Inspection(
        policy=reports[0].policy,
        tokens=tuple(prompt_ids),
        text=whole[:end],
        spans=tuple(spans[:n]),
        layers=indices,
        layers_without=tuple(i for i in range(len(caches)) if i not in indices),
        heads=tuple(heads),
        positions=_positions(watcher, heads, n),
        sentences=sentences,
        report=reports[0],
        answer="".join(r.text for r in responses),
        answer_tokens=tuple(whole[max(a, end) : b] for a, b in spans[n:]),
        attended=watcher.attended(len(said)),
    )


def _positions(watcher: Watcher, heads: list[int], n: int) -> np.ndarray:
    """What all layers keep as one array, -1 where there is nothing; everything, if nothing was dropped."""
    everything = {k: np.tile(np.arange(n, dtype=np.int32), (h, 1)) for k, h in enumerate(heads)}
    kept = [(watcher.kept or everything)[k] for k in range(len(heads))]
    most = max(rows.shape[1] for rows in kept)
    found = np.full((len(heads), max(heads), most), -1, np.int32)
    for layer, rows in zip(found, kept, strict=True):
        layer[: rows.shape[0], : rows.shape[1]] = rows
    return found


def _counts(
    watcher: Watcher, heads: list[int], policy: Policy | Stages, n: int
) -> np.ndarray:
    """What `ranked` wants to know of every token.

    Those have the choice that would not keep it anyway, as one of the first or most recent entries.
    """
    _, last = policy.stages
    at = decide(policy, n).at
    counts = np.zeros((5, n))
    for number, quota in enumerate(last.quotas(n, len(heads))):
        positions = watcher.kept[number]
        kept = np.bincount(positions.reshape(-1), minlength=n)
        free = np.ones(n)
        free[: quota.n_sink] = free[max(0, at - quota.n_window) :] = 0
        votes = np.zeros(n)
        if number in watcher.votes:
            weights = watcher.votes[number].reshape(-1)
            votes = np.bincount(positions.reshape(-1), weights, minlength=n)
        n_heads = np.full(n, heads[number])
        counts += np.stack([kept, n_heads, kept * free, n_heads * free, votes * free])
    return counts
