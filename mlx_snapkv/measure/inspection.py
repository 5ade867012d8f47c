"""Answer a compressed prompt and record which entries were kept and what the answer attended to."""

import functools
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.layers import attention_layers
from ..compress.options import Compress
from ..compress.policies import SnapKV
from ..compress.policy import Policy
from ..compress.recording import RecordingKVCache
from ..engine.generate import encode_prompt
from ..engine.prefill import mlx_generate
from ..engine.report import CompressionReport
from ..engine.serving import serve
from ..entries.queries import on_queries
from ..errors import OptionError
from ..models import attention_classes
from ..models.patch import recording
from ..planning.config import CompressionConfig
from ..planning.prompt_plan import MAX_TOKENS, PREFILL_STEP_SIZE
from ..planning.settings import resolve_compress
from .recorder import Attended, Recorder
from .sentences import Sentence, Span, rank_sentences, special_tokens, token_spans


@dataclass(frozen=True, eq=False)
class Inspection:
    """The prompt entries that a policy kept, and what the answer attended to.

    Attributes:
        policy: the setting, as written on the command line.
        tokens, text: the prompt's token ids and text.
        spans: character range `(start, stop)` of each token in the text. Tokens that together form one character share
            its span.
        layers: indices of the model's full-attention layers, matching the first axis of `positions`.
        layers_without: indices of the other layers (linear, state-space and sliding-window layers).
        heads: number of KV heads in each of `layers`.
        positions: int32 `(n_layers, n_kv_heads, n_kept)`, prompt positions that each head keeps, in ascending order.
            Layers with fewer heads or entries are padded with -1. If nothing was evicted, each head has all positions.
        sentences: sentences with at least one kept entry, ranked by `rank_sentences`. Empty if nothing was evicted.
        report: the compression report.
        answer: the answer's text.
        answer_tokens: text of each answer token.
        attended: what each answer token attended to.
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
        """Return the number of prompt tokens."""
        return len(self.tokens)

    @property
    def kept(self) -> np.ndarray:
        """Return bool `(n_layers, n_kv_heads, n_tokens)`, True where a head keeps a token's entry."""
        kept = np.zeros((*self.positions.shape[:2], self.n_tokens + 1), bool)
        # The padding (-1) writes to the last column, which is dropped.
        np.put_along_axis(kept, self.positions.astype(np.int64), True, axis=-1)
        return kept[..., :-1]

    @property
    def shares(self) -> list[float | None]:
        """Return, for each of `layers`, the share (0 to 1) of attention that went to kept entries.

        Only the attention of voting queries counts. The share is None if no queries vote.
        """
        shares = self.report.attention_share
        return [shares[layer] if shares else None for layer in self.layers]

    def density(self, n_columns: int) -> np.ndarray:
        """Return the share (0 to 1) of entries kept in each of `n_columns` prompt parts, `(n_layers, n_columns)`.

        If the prompt has fewer than `n_columns` tokens, each token is one part.
        """
        n_columns = min(n_columns, self.n_tokens)
        edges = np.linspace(0, self.n_tokens, n_columns + 1).round().astype(int)
        n_kept = np.add.reduceat(self.kept.sum(axis=1), edges[:-1], axis=1)
        n_entries = np.diff(edges) * np.array(self.heads)[:, None]
        return n_kept / n_entries

    def to_dict(self) -> dict[str, Any]:
        """Return the inspection as a dict for JSON, with unpadded positions."""
        layers = []
        for layer, layer_positions, n_heads, share in zip(
            self.layers, self.positions, self.heads, self.shares, strict=True
        ):
            unpadded = [positions[positions >= 0] for positions in layer_positions[:n_heads]]
            layers.append(
                {
                    "layer": layer,
                    "attention_share": share,
                    "positions": [positions.tolist() for positions in unpadded],
                }
            )
        return {
            "policy": self.policy,
            "report": self.report.to_dict(),
            "layers": layers,
            "layers_without_entries": list(self.layers_without),
            "sentences": [asdict(sentence) for sentence in self.sentences],
            "answer": {
                "text": self.answer,
                "predicted_before_compression": self.attended.n_before,
                "tokens": self._attended_by_token(),
            },
        }

    def _attended_by_token(self) -> list[dict[str, Any]]:
        """Return what each answer token attended to, averaged over all layers, for JSON."""
        mean_of_layers = -1  # index on the layer axis
        records = []
        for text, positions, weights, answer_share in zip(
            self.answer_tokens,
            self.attended.positions[:, mean_of_layers],
            self.attended.weights[:, mean_of_layers],
            self.attended.own[:, mean_of_layers],
        ):
            is_recorded = positions >= 0
            records.append(
                {
                    "text": text,
                    "positions": positions[is_recorded].tolist(),
                    "weights": weights[is_recorded].astype(float).round(6).tolist(),
                    "own": round(float(answer_share), 6),
                }
            )
        return records


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
    """Answer a prompt greedily, like `generate`, and record which entries were kept and what the answer attended to.

    Attention weights are computed separately, from the model's queries. This slows down every token, so the speed is
    not representative.

    Args:
        model: an mlx-lm model.
        tokenizer: the model's tokenizer.
        prompt: text or token ids. No chat template is applied.
        max_tokens: maximum number of tokens in the answer.
        snapkv: see `stream_generate`.
        policy: see `stream_generate`; "auto" is not supported. Nothing is evicted without a policy, or if the prompt is
            shorter than the policy's `min_ctx`.
        **options: `prefill_step_size` and `prompt_progress_callback`; see `prefill`.

    Raises: SnapKVError: the prompt is empty, `max_tokens` is below 1, the policy is invalid, or the model is not
        supported.
    """
    compress = resolve_compress(snapkv, policy)
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    tokens = encode_prompt(tokenizer, prompt)
    if max_tokens < 1:
        raise OptionError("max_tokens", "at least 1", max_tokens)
    caches = make_prompt_cache(model)
    layers = attention_layers(model, caches)
    for layer in layers:
        # Without compression, the request runs on these caches. They store no queries, but pass them to the
        # `on_queries` callback.
        layer.put(caches, RecordingKVCache(0, 0, tokens.size + max_tokens + 1, layer))
    recorder = Recorder(layers, tokens.size, max_tokens)
    options = {"prefill_step_size": PREFILL_STEP_SIZE, **options, "prompt_cache": caches}
    responses = _answer_and_record(
        model, tokenizer, tokens, max_tokens, compress, recorder, options
    )
    prompt_tokens: Any = tokens.tolist()
    return _make_inspection(
        tokenizer,
        prompt_tokens,
        compress,
        layers=[layer.index for layer in layers],
        n_layers=len(caches),
        recorder=recorder,
        responses=responses,
    )


def _answer_and_record(
    model: Any,
    tokenizer: Any,
    tokens: mx.array,
    max_tokens: int,
    policy: Compress | None,
    recorder: Recorder,
    options: dict[str, Any],
) -> list[GenerationResponse]:
    """Answer the prompt with the recorder attached, and return mlx-lm's responses."""
    response_iterator = serve(
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
        for response in response_iterator:
            recorder.record()
            responses.append(response)
    return responses


def _make_inspection(
    tokenizer: Any,
    tokens: list[int],
    compress: Compress | None,
    layers: list[int],
    n_layers: int,
    recorder: Recorder,
    responses: list[GenerationResponse],
) -> Inspection:
    """Combine the recorder's records with the tokens' text.

    Args:
        tokenizer: the model's tokenizer.
        tokens: token ids of the prompt.
        compress: the policy or policies, or None for the full cache.
        layers: indices of the model's full-attention layers.
        n_layers: total number of layers in the model.
        recorder: recorder of the finished request.
        responses: mlx-lm's responses, one per answer token.
    """
    n_prompt = len(tokens)
    # The last response may contain the end-of-sequence token, which is not part of the answer.
    answer_tokens = [response.token for response in responses if response.finish_reason != "stop"]
    text, spans = token_spans(tokenizer, [*tokens, *answer_tokens])
    prompt_spans = spans[:n_prompt]
    prompt_end = prompt_spans[-1][1]
    prompt_text = text[:prompt_end]
    sentences: tuple[Sentence, ...] = ()
    if compress is not None and recorder.kept:
        counts = recorder.counts(compress.decode_policy.quota(n_prompt))
        is_special = np.isin(tokens, sorted(special_tokens(tokenizer)))
        has_votes = bool(recorder.votes)
        sentences = rank_sentences(prompt_text, prompt_spans, is_special, counts, has_votes)
    # The first answer tokens may share a character, and so a span, with the prompt's last token. Leave this character
    # out, because it is in the prompt's text.
    answer_texts = [text[max(start, prompt_end) : stop] for start, stop in spans[n_prompt:]]
    return Inspection(
        policy=recorder.report.policy,
        tokens=tuple(tokens),
        text=prompt_text,
        spans=tuple(prompt_spans),
        layers=tuple(layers),
        layers_without=tuple(layer for layer in range(n_layers) if layer not in layers),
        heads=tuple(recorder.n_heads),
        positions=recorder.positions,
        sentences=sentences,
        report=recorder.report,
        answer="".join(response.text for response in responses),
        answer_tokens=tuple(answer_texts),
        attended=recorder.attended(len(answer_tokens)),
    )
