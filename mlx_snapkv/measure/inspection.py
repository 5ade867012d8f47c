"""`inspect_prompt`: a prompt compressed and answered, with everything that is known of it."""

import functools
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.layers import AttentionLayer, attention_layers
from ..compress.options import Compress
from ..compress.policies import SnapKV
from ..compress.policy import Policy
from ..compress.recording import RecordingKVCache
from ..engine.generate import encode_prompt
from ..engine.prefill import mlx_generate
from ..engine.report import CompressionReport
from ..engine.serving import served
from ..engine.token_ids import token_ids
from ..entries.queries import on_queries
from ..errors import OptionError
from ..models import attention_classes
from ..models.patch import recording
from ..planning.config import CompressionConfig
from ..planning.prompt_plan import MAX_TOKENS, PREFILL_STEP_SIZE
from ..planning.settings import resolve_compress
from .recorder import Attended, Recorder
from .sentences import Sentence, Span, ranked, special_tokens, token_spans


@dataclass(frozen=True, eq=False)
class Inspection:
    """What a policy kept of a prompt, and what the answer attended to.

    Attributes:
        tokens, text: the prompt's ids, and what they say.
        spans: of each token in the text; tokens that only make a character together share theirs.
        layers: the model's layers with entries, by their number from 0; the rows of `positions`.
        layers_without: those without: linear or state-space layers, and sliding windows, which forget by themselves.
        heads: KV heads of each of `layers`.
        positions: int32 `(n_layers, n_kv_heads, n_kept)`, the tokens whose entries each head keeps, in order. -1 behind
            them where a layer keeps fewer, or has fewer heads.
        sentences: those of which anything is kept, the most kept first; none if nothing was dropped.
        report: what the compression did, or why nothing was dropped: then all positions are kept.
        answer_tokens: the texts of the answer's tokens, and what these `attended` to.
    """

    policy: str
    tokens: tuple[int, ...]
    text: str
    spans: tuple[Span, ...]
    layers: tuple[int, ...]
    layers_without: tuple[int, ...]
    heads: tuple[int, ...]
    positions: np.ndarray
    sentences: tuple[Sentence, ...]
    report: CompressionReport
    answer: str
    answer_tokens: tuple[str, ...]
    attended: Attended

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def kept(self) -> np.ndarray:
        """Bool `(n_layers, n_kv_heads, n_tokens)`: which head keeps which token's entry."""
        kept = np.zeros((*self.positions.shape[:2], self.n_tokens + 1), bool)
        # What is none falls off the end.
        np.put_along_axis(kept, self.positions.astype(np.int64), True, axis=-1)
        return kept[..., :-1]

    @property
    def shares(self) -> list[float | None]:
        """Of each of `layers`, the share (0 to 1) of the voters' attention that went to what is kept, if known."""
        known = self.report.attention_share
        return [known[layer] if known else None for layer in self.layers]

    def density(self, n_columns: int) -> np.ndarray:
        """`(n_layers, n_columns)`, 0 to 1: of the entries in each part of the prompt, the share that is kept."""
        edges = np.linspace(0, self.n_tokens, min(n_columns, self.n_tokens) + 1).round().astype(int)
        counts = np.add.reduceat(self.kept.sum(axis=1), edges[:-1], axis=1)
        return counts / np.diff(edges) / np.array(self.heads)[:, None]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON has it; positions are lists without their -1."""
        each = zip(self.layers, self.positions, self.heads, self.shares, strict=True)
        layers = [
            {
                "layer": layer,
                "attention_share": share,
                "positions": [row[row >= 0].tolist() for row in rows[:n_heads]],
            }
            for layer, rows, n_heads, share in each
        ]
        of = self.attended  # the last layer is the mean of all
        attended = zip(self.answer_tokens, of.positions[:, -1], of.weights[:, -1], of.own[:, -1])
        tokens = [
            {
                "text": text,
                "positions": positions[positions >= 0].tolist(),
                "weights": weights[positions >= 0].astype(float).round(6).tolist(),
                "own": round(float(own), 6),
            }
            for text, positions, weights, own in attended
        ]
        return {
            "policy": self.policy,
            "report": self.report.to_dict(),
            "layers": layers,
            "layers_without_entries": list(self.layers_without),
            "sentences": [asdict(sentence) for sentence in self.sentences],
            "answer": {
                "text": self.answer,
                "predicted_before_compression": of.n_before,
                "tokens": tokens,
            },
        }


def inspect_prompt(
    model: Any,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = MAX_TOKENS,
    *,
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Policy | Compress | str | None = None,
    **options: Any,
) -> Inspection:
    """Answer a prompt as `generate` does, greedily, and record what was kept of it and what the answer attended to.

    The weights are those of the attention's own calls. Every token waits for them, so its speed means nothing.

    Args:
        prompt: a text, to which no chat template is applied, or token ids, as of `stream_generate`.
        snapkv, policy: as of `stream_generate` but for "auto"; without either, or below the policy's `min_ctx`, nothing
            is dropped.
        **options: `prefill_step_size` and `prompt_progress_callback`, as of `prefill`.

    Raises: SnapKVError: the prompt or the answer is empty, the policy can't be read, or the model is not supported.
    """
    chosen = resolve_compress(snapkv, policy)
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    tokens = token_ids(encode_prompt(tokenizer, prompt))
    if max_tokens < 1:
        raise OptionError("max_tokens", "at least 1", max_tokens)
    caches = make_prompt_cache(model)
    layers = attention_layers(model, caches)
    for layer in layers:
        # It records no queries itself, but has the attention's calls seen where nothing is dropped.
        layer.put(caches, RecordingKVCache(0, 0, tokens.size + max_tokens + 1, layer))
    recorder = Recorder(layers, tokens.size, max_tokens)
    options = {"prefill_step_size": PREFILL_STEP_SIZE, **options, "prompt_cache": caches}
    responses = _answer(model, tokenizer, tokens, max_tokens, chosen, recorder, options)
    read: Any = tokens.tolist()
    return _inspection(tokenizer, read, chosen, layers, len(caches), recorder, responses)


def _answer(
    model: Any,
    tokenizer: Any,
    tokens: mx.array,
    max_tokens: int,
    policy: Compress | None,
    recorder: Recorder,
    options: dict[str, Any],
) -> list[GenerationResponse]:
    """mlx-lm's responses to a prompt, while what is kept and attended to is recorded."""
    steps = served(
        functools.partial(
            mlx_generate.stream_generate, tokenizer=tokenizer, prompt=tokens, max_tokens=max_tokens
        ),
        model,
        tokens.size,
        max_tokens,
        CompressionConfig(policy),
        recorder.on_report,
        options,
        on_kept=recorder.on_kept,
    )
    responses = []
    with recording(attention_classes(model)), on_queries(recorder.on_queries):
        for response in steps:
            recorder.record()
            responses.append(response)
    return responses


def _inspection(
    tokenizer: Any,
    tokens: list[int],
    policy: Compress | None,
    layers: list[AttentionLayer],
    n_caches: int,
    recorder: Recorder,
    responses: list[GenerationResponse],
) -> Inspection:
    """What was recorded of a prompt and its answer, with the texts of their tokens."""
    n = len(tokens)
    answer_tokens = [response.token for response in responses if response.finish_reason != "stop"]
    whole, spans = token_spans(tokenizer, [*tokens, *answer_tokens])
    end = spans[n - 1][1]
    sentences: tuple[Sentence, ...] = ()
    if policy is not None and recorder.kept:
        counts = recorder.counts(policy.decode_policy.quota(n))
        special = np.isin(tokens, sorted(special_tokens(tokenizer)))
        sentences = ranked(whole[:end], spans[:n], special, counts, bool(recorder.votes))
    with_entries = [layer.index for layer in layers]
    return Inspection(
        policy=recorder.report.policy,
        tokens=tuple(tokens),
        text=whole[:end],
        spans=tuple(spans[:n]),
        layers=tuple(with_entries),
        layers_without=tuple(sorted({*range(n_caches)} - {*with_entries})),
        heads=tuple(recorder.n_heads),
        positions=recorder.positions,
        sentences=sentences,
        report=recorder.report,
        answer="".join(response.text for response in responses),
        answer_tokens=tuple(whole[max(a, end) : b] for a, b in spans[n:]),
        attended=recorder.attended(len(answer_tokens)),
    )
