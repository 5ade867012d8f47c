"""`inspect_prompt`: a prompt compressed and answered, with everything that is known of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.layers import AttentionLayer, attention_layers
from ..caches.recording import RecordingKVCache
from ..engine.decision import PREFILL_STEP_SIZE, ProgressCallback, decide
from ..engine.generate import encode_prompt
from ..engine.prefill import mlx_generate
from ..engine.recalling import Recall
from ..engine.serving import MAX_TOKENS, served
from ..entries.queries import overheard_by
from ..errors import SnapKVError
from ..models import attention_classes
from ..models.patch import recording
from ..policies import Policy, SnapKV, Stages, resolve_policy
from .inspection import Inspection
from .recorder import Recorder
from .sentences import Sentence, ranked
from .spans import Span, special_tokens, token_spans


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
    """Answer a prompt as `generate` does, greedily, and record what was kept of it and what the answer attended to.

    The weights are those of the attention's own queries and entries, taken when it was called. Every token waits for
    them, so this is no way to measure speed.

    Args:
        prompt: a text, to which no chat template is applied, or token ids, as of `stream_generate`.
        max_tokens: of the answer, at most.
        snapkv, policy: as of `stream_generate`; without either, or below the policy's `min_ctx`, nothing is dropped.
        prefill_step_size, prompt_progress_callback: as of `prefill`.

    Raises:
        SnapKVError: the prompt or the answer is empty, the policy can't be read, or the model is not supported.
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
        # It records no queries itself, but has the attention's calls seen where nothing is dropped.
        layer.put(caches, RecordingKVCache(0, 0, tokens.size + max_tokens + 1, layer))
    recorder = Recorder(layers, tokens.size, max_tokens)
    given = {"tokenizer": tokenizer, "prompt": tokens, "max_tokens": max_tokens}
    start = functools.partial(mlx_generate.stream_generate, **given)
    wanted = model, tokens, max_tokens, chosen, Recall(), recorder.on_report
    options = {
        "prompt_cache": caches,
        "prefill_step_size": prefill_step_size,
        "prompt_progress_callback": prompt_progress_callback,
    }
    responses = []
    with recording(attention_classes(model)), overheard_by(recorder.on_queries):
        for response in served(start, *wanted, options, on_kept=recorder.on_kept):
            recorder.record()
            responses.append(response)
    asked = _Asked(chosen, tokenizer, tokens.tolist(), layers, len(caches))  # type: ignore[arg-type]
    return asked.inspection(recorder, responses)


@dataclass
class _Asked:
    """What was asked, of which model."""

    policy: Policy | Stages | None
    tokenizer: TokenizerWrapper
    tokens: list[int]
    layers: list[AttentionLayer]
    n_caches: int

    def inspection(self, recorder: Recorder, responses: list[GenerationResponse]) -> Inspection:
        n = len(self.tokens)
        said = [response.token for response in responses if response.finish_reason != "stop"]
        whole, spans = token_spans(self.tokenizer, self.tokens + said)
        end = spans[n - 1][1]
        indices = tuple(layer.index for layer in self.layers)
        return Inspection(
            policy=recorder.report.policy,
            tokens=tuple(self.tokens),
            text=whole[:end],
            spans=tuple(spans[:n]),
            layers=indices,
            layers_without=tuple(i for i in range(self.n_caches) if i not in indices),
            heads=tuple(recorder.n_heads),
            positions=recorder.positions,
            sentences=self._sentences(recorder, whole[:end], spans[:n]),
            report=recorder.report,
            answer="".join(response.text for response in responses),
            answer_tokens=tuple(whole[max(a, end) : b] for a, b in spans[n:]),
            attended=recorder.attended(len(said)),
        )

    def _sentences(self, recorder: Recorder, text: str, spans: list[Span]) -> tuple[Sentence, ...]:
        if self.policy is None or not recorder.kept:
            return ()
        n = len(self.tokens)
        _, last = self.policy.stages
        quotas = last.quotas(n, len(self.layers))
        counts = recorder.counts(quotas, decide(self.policy, n).at)
        special = np.isin(self.tokens, sorted(special_tokens(self.tokenizer)))
        return ranked(text, spans, special, counts, bool(recorder.votes))
