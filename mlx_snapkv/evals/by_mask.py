"""Answers that see of a prompt what a method with head-wise budgets keeps, while all entries are held.

At decoding a mask for each KV head hides the others. It measures accuracy, and neither speed nor memory: every token is
read over all entries.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache

from ..caches.contract import LayerCache
from ..caches.layers import AttentionLayer, is_fresh, kv_bytes, quotas_of
from ..caches.recording import RecordingKVCache
from ..engine import generate
from ..engine.prefill import look_ahead, mlx_generate, read
from ..engine.report import CompressionReport
from ..engine.request import Request
from ..engine.serving import drive
from ..errors import SnapKVError, UnsupportedModelError
from ..policies.budgets import Quota
from .headwise import HeadWise, Kinds


class MaskedKVCache(RecordingKVCache):
    """A recording cache that hides some entries from the attention, once it is told which.

    Attributes:
        visible: bool `(B, n_kv_heads, n)`, of the first `n` entries; later ones are seen. None hides nothing.
    """

    observes = True  # so that its layer's class is patched while the answer is decoded
    visible: mx.array | None = None

    def hide(self, queries: mx.array, keys: mx.array, mask: Any) -> Any:
        """What the attention of queries `(B, n_heads, L, D)` to keys `(B, n_kv_heads, T, D)` is to be masked by.

        Args:
            mask: what it would be: None, "causal" or an array.

        Raises:
            UnsupportedModelError: the keys are not those of its own heads.
        """
        if self.visible is None:
            return mask
        B, H, T = keys.shape[:3]
        n_heads, L = queries.shape[1:3]
        if self.visible.shape[1] != H:
            raise UnsupportedModelError("this model's heads can't be masked: it repeats their keys")
        later = mx.ones((B, H, T - self.visible.shape[2]), mx.bool_)
        seen = mx.concatenate([self.visible, later], axis=-1)
        seen = mx.repeat(seen, n_heads // H, axis=1)[:, :, None]
        if mask is None:
            return seen
        if isinstance(mask, str):
            mask = mx.arange(T - L, T)[:, None] >= mx.arange(T)
        return seen & mask if mask.dtype == mx.bool_ else mx.where(seen, mask, -mx.inf)


@dataclass
class MaskedRequest(Request):
    """A request whose compression hides entries instead of dropping them.

    Args:
        heads: which of them each head sees.
        kinds: of the tokens to read.
    """

    heads: HeadWise = None  # type: ignore[assignment]
    kinds: Kinds = None  # type: ignore[assignment]

    def _prefill_cache(self, layer: AttentionLayer, quota: Quota, uniform: bool) -> LayerCache:
        family = layer.family
        if family.attends != "scaled_dot_product_attention" or family.tiled or family.latent:
            raise UnsupportedModelError(
                f"the heads of {family.module!r} models can't be masked one by one: leave --by-mask out"
            )
        cache = super()._prefill_cache(layer, quota, uniform)
        assert isinstance(cache, RecordingKVCache)
        masked = MaskedKVCache(int(cache.first), int(cache.last), cache.step, layer)
        masked.statistics_from = cache.statistics_from
        return masked

    @property
    def _observes_answer(self) -> bool:
        return True

    def _replace(self) -> CompressionReport:
        decision = self.decision
        report = CompressionReport(str(self.heads), decision.n_prompt)
        quotas = quotas_of(self._layers, self.heads.policy.quotas, decision.n_prompt)
        shares = []
        for layer, quota in zip(self._layers, quotas):
            cache = layer.cache_in(self.caches)
            entries = cache.held().between(0, decision.at)
            cache.visible = self.heads.visible(entries, quota, self.kinds)
            mx.eval(cache.visible)
            shares.append(cache.visible.mean().item())
        report.entries_kept = [round(decision.at * sum(shares) / len(shares))]
        report.kv_bytes_before = report.kv_bytes_after = kv_bytes(self.caches)
        self.prompt_cache[:] = self.caches
        return report


def kinds_of(tokenizer, tokens: list[int]) -> Kinds:
    """Special tokens, and those that are nothing but punctuation."""
    special = set(tokenizer.all_special_ids)
    text = {token: tokenizer.decode([token]).strip() for token in set(tokens)}
    marks = {token for token, x in text.items() if x and all(map(_is_punctuation, x))} - special
    return Kinds(mx.array([t in special for t in tokens]), mx.array([t in marks for t in tokens]))


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character).startswith("P")


def _request(model, tokenizer, tokens: list[int], heads: HeadWise, cache: list) -> MaskedRequest:
    policy = heads.policy
    if len(tokens) < policy.min_ctx or policy.fits(len(tokens)):
        raise SnapKVError(
            f"{heads} would hide nothing of {len(tokens)} tokens: give it a lower budget and min_ctx=0"
        )
    kinds = kinds_of(tokenizer, tokens)
    return MaskedRequest(model, policy, len(tokens), cache, heads=heads, kinds=kinds)


def prefill(model, tokenizer, tokens: list[int], heads: HeadWise) -> tuple[list, CompressionReport]:
    """A prompt cache that holds all of `tokens` and shows what `heads` keeps; its report, of entries the mean."""
    cache = make_prompt_cache(model)
    request = _request(model, tokenizer, tokens, heads, cache)
    with request.recording():
        options = {"prefill_step_size": request.step_size(None)}
        following = read(request.loop_model, mx.array(tokens), request.caches, options)
        n_ahead = request.decision.last - len(tokens)
        if n_ahead > 0:
            look_ahead(model, request.caches, mx.argmax(following, axis=-1), n_ahead)
        return cache, request.compress()


def stream_generate(
    model,
    tokenizer,
    prompt: list[int],
    max_tokens: int,
    *,
    policy: HeadWise,
    prompt_cache: list,
    on_report: Callable[[CompressionReport], None],
) -> Iterator[GenerationResponse]:
    """`stream_generate`, by mask: on a fresh cache of the prompt, or on one that `prefill` has given."""
    if not is_fresh(prompt_cache):
        return generate.stream_generate(
            model, tokenizer, prompt, max_tokens, prompt_cache=prompt_cache, on_report=on_report
        )
    request = _request(model, tokenizer, prompt, policy, prompt_cache)
    asked = {"tokenizer": tokenizer, "prompt": mx.array(prompt), "max_tokens": max_tokens}
    start = functools.partial(mlx_generate.stream_generate, **asked)
    return drive(start, request, on_report, {}, lambda item, seconds: item, keep=True)
