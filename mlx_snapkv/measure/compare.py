"""Answer a prompt with several methods and compare each answer with the full cache's answer."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers, kv_bytes, n_tokens
from ..compress.options import Compress
from ..engine.generate import stream_generate
from ..engine.report import CompressionReport
from ..engine.token_ids import common_prefix
from ..planning.config import CompressionConfig
from ..planning.request_plan import plan_request
from .divergence import Reference
from .methods import Method
from .reading import read_once

N_CONTEXT_TOKENS = 8  # answer tokens shown before the first difference


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    Attributes:
        tokens: answer tokens, including any end-of-sequence token.
        cache: prompt cache after the answer. With sparse attention, it contains all entries.
        times: `time.perf_counter()` at the start and after each decoded token. The `first_tokens` of `decode` are not
            decoded, so they have no time.
        n_times_before: number of `times` before compression.
    """

    text: str
    tokens: list[int]
    cache: list
    report: CompressionReport
    times: list[float]
    n_times_before: int


def decode(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    max_tokens: int,
    cache: list,
    report: CompressionReport | None = None,
    first_tokens: Sequence[int] = (),
    on_text: Callable[[str], None] = lambda text: None,
    on_report: Callable[[CompressionReport], None] = lambda report: None,
    **options: Any,
) -> Answer:
    """Read the tokens that `cache` has not read yet, then decode a greedy answer.

    Args:
        model: an mlx-lm model.
        tokenizer: the model's tokenizer.
        prompt: token ids of the whole prompt.
        max_tokens: maximum number of tokens in the answer, including `first_tokens`.
        cache: prompt cache to continue from. At least the last token of `[*prompt, *first_tokens]` must still be
            unread.
        report: report on the cache's compression, or None if `stream_generate` should compress the prompt.
        first_tokens: the answer's first tokens, if they are already known.
        on_text: called with each new part of the answer's text. End-of-sequence tokens have no text.
        on_report: called with the report of `stream_generate`, unless `report` is given.
        **options: keyword arguments for `stream_generate`, ignored if `report` is given.
    """
    times = [time.perf_counter()]
    n_times_before = 0

    def note_report(new_report: CompressionReport) -> None:
        nonlocal n_times_before, report
        report = new_report
        n_times_before = len(times)
        on_report(new_report)

    def answer_tokens() -> Iterator[int]:
        yield from first_tokens
        n_left = max_tokens - len(first_tokens)
        has_ended = bool(first_tokens) and first_tokens[-1] in tokenizer.eos_token_ids
        if n_left <= 0 or has_ended:
            return
        unread = [*prompt, *first_tokens][n_tokens(cache) :]
        keywords = {"on_report": note_report, **options} if report is None else {}
        for response in stream_generate(
            model, tokenizer, unread, n_left, prompt_cache=cache, **keywords
        ):
            times.append(time.perf_counter())
            yield response.token

    text, tokens = _text_and_tokens(tokenizer, answer_tokens(), on_text)
    assert report is not None
    return Answer(
        text=text,
        tokens=tokens,
        cache=cache,
        report=report,
        times=times,
        n_times_before=n_times_before,
    )


def _text_and_tokens(
    tokenizer: Any, tokens: Iterable[int], on_text: Callable[[str], None]
) -> tuple[str, list[int]]:
    """Decode tokens to text. Return the text and the tokens, and call `on_text` with each new part of the text."""
    detokenizer = tokenizer.detokenizer
    all_tokens = []
    for token in tokens:
        all_tokens.append(token)
        if token not in tokenizer.eos_token_ids:
            detokenizer.add_token(token)
            on_text(detokenizer.last_segment)
    detokenizer.finalize()
    on_text(detokenizer.last_segment)
    return detokenizer.text, all_tokens


@dataclass(frozen=True)
class Compared:
    """A method's answer, compared with the full cache's answer.

    Attributes:
        tokens: answer tokens, including any end-of-sequence token.
        entries: number of entries kept per KV head or, with sparse attention, read per token. If layers differ, this is
            the largest number.
        kv_bytes: bytes of keys, values and indexes in memory after compression. For the full cache, measured after the
            answer.
        first_token_seconds: seconds from the start of prefill to the first token. Methods that share one reading of the
            prompt have the same value.
        tokens_per_second: decoding speed after compression, or None if there are too few tokens.
        n_before: number of answer tokens decoded before compression: at least two, and more with a lookahead of several
            tokens. 0 if nothing is compressed.
        kl: mean KL divergence from the full cache, in nats per token. It is measured on the full cache's answer without
            its first `n_before` tokens, as in `eval fidelity --setting known`. None if there are no other tokens.
        uncompressed: a sentence that says why `kl` is None, or None if `kl` is a number.
        differs: the first difference from the full cache's answer, as (token index, text before the token, text of the
            full cache's token, text of this answer's token). None if the answers are equal.
        reason: why the method leaves the prompt to the full cache, or None if it does not.
        kept: `(n_prompt,)`, for each prompt token, the share (0 to 1) of KV heads that keep its entry, over all layers.
            None for methods that evict nothing.
    """

    name: str
    text: str
    tokens: list[int]
    entries: int
    kv_bytes: int
    first_token_seconds: float
    tokens_per_second: float | None
    kl: float | None = 0.0
    n_before: int = 0
    uncompressed: str | None = None
    differs: tuple[int, str, str, str] | None = None
    reason: str | None = None
    kept: np.ndarray | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except `kept`, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "kept"}


def compare(
    model: Any,
    tokenizer: Any,
    tokens: Sequence[int],
    methods: Sequence[Method],
    max_tokens: int,
    on_text: Callable[[str, str], None] = lambda name, text: None,
    **options: Any,
) -> Iterator[Compared]:
    """Answer a prompt greedily with each method, as `generate` would, and yield the answers.

    Policies that need no separate pass over the prompt (see `shares_reading`) share one reading of it.

    Args:
        model: an mlx-lm model.
        tokenizer: the model's tokenizer.
        tokens: token ids of the prompt.
        methods: the full cache, followed by the methods to compare with it.
        max_tokens: maximum number of tokens in each answer.
        on_text: called with a method's name and each new part of the method's answer.
        **options: `prefill_step_size` and `prompt_progress_callback`, for reading the prompt.
    """
    comparison = _Comparison(model, tokenizer, tokens, methods, max_tokens, on_text, options)
    yield comparison.full
    for method in methods[1:]:
        yield comparison.answer_and_compare(method)


class _Comparison:
    """Answers one prompt with several methods. See `compare` for the arguments.

    Attributes:
        full: the full cache's answer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        tokens: Sequence[int],
        methods: Sequence[Method],
        max_tokens: int,
        on_text: Callable[[str, str], None],
        options: dict[str, Any],
    ):
        """Read the prompt into full caches and decode the full cache's answer."""
        self._model = model
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._max_tokens = max_tokens
        self._on_text = on_text
        self._options = options
        started = time.perf_counter()
        policies = [method.policy for method in methods if method.shares_reading]
        self._reading = read_once(model, tokens, policies, **options)
        self._read_seconds = time.perf_counter() - started
        name = methods[0].name
        cache, report = self._reading.compress(None)
        answer = self._decode(name, cache, report, first_tokens=self._reading.answer(1))
        self.full = self._figures_of(name, answer, self._read_seconds)
        self._reference = Reference(self._reading, self.full.tokens)

    def answer_and_compare(self, method: Method) -> Compared:
        """Answer the prompt with a method and compare the answer with the full cache's."""
        plan = plan_request(
            self._model,
            CompressionConfig(method.policy),
            len(self._tokens),
            max_tokens=self._max_tokens,
        )
        if plan.is_left_to_mlx_lm:
            self._on_text(method.name, self.full.text)
            return replace(self.full, name=method.name, reason=plan.reason)
        n_before = plan.n_decoded_before_compression
        if method.shares_reading:
            answer, kept_share, logprobs = self._answer_from_shared_reading(method, n_before)
            read_seconds = self._read_seconds
        else:
            answer, kept_share, logprobs = self._answer_from_own_reading(method)
            started, first_token_time, *_ = answer.times
            read_seconds = first_token_time - started
        kl = self._reference.kl_and_same(logprobs)["kl"]
        uncompressed = None
        if kl is None:
            uncompressed = (
                f"not compressed yet: the answer has {len(self.full.tokens)} tokens, "
                f"and the first {n_before} are decoded before the compression"
            )
        return replace(
            self._figures_of(method.name, answer, read_seconds),
            kl=None if kl is None else float(kl),
            n_before=n_before,
            uncompressed=uncompressed,
            kept=kept_share,
            differs=_difference(self._tokenizer, self.full.tokens, answer.tokens),
        )

    def _decode(
        self, name: str, cache: list, report: CompressionReport | None = None, **options: Any
    ) -> Answer:
        """Decode an answer and pass its text to `on_text` with the method's name."""
        return decode(
            self._model,
            self._tokenizer,
            self._tokens,
            self._max_tokens,
            cache,
            report,
            on_text=partial(self._on_text, name),
            **options,
        )

    def _answer_from_shared_reading(
        self, method: Method, n_before: int
    ) -> tuple[Answer, np.ndarray | None, mx.array]:
        """Answer with a policy that can compress the shared reading of the prompt.

        Args:
            method: the policy.
            n_before: number of answer tokens decoded before compression. They are taken from the full cache's answer.

        Returns: The answer, `Compared.kept`, and the policy's log-probabilities `(m, vocab_size)` for the last `m`
            tokens of the full cache's answer.
        """
        cache, report = self._reading.compress(method.policy, answering=True)
        compressed_cache = copy.deepcopy(cache)  # because decoding changes `cache`
        first_tokens = self.full.tokens[:n_before]
        answer = self._decode(method.name, cache, report, first_tokens=first_tokens)
        kept_share = self._kept_share(compressed_cache)
        return answer, kept_share, self._reference.predictions(compressed_cache)

    def _answer_from_own_reading(
        self, method: Method
    ) -> tuple[Answer, np.ndarray | None, mx.array]:
        """Answer with a method that needs a separate pass over the prompt.

        See `_answer_from_shared_reading` for the result.
        """
        cache = make_prompt_cache(self._model)
        compressed_cache: list | None = None

        def copy_cache(report: CompressionReport) -> None:
            nonlocal compressed_cache
            if isinstance(method.policy, Compress):
                compressed_cache = copy.deepcopy(cache)

        options = {"policy": method.policy, **self._options}
        answer = self._decode(method.name, cache, on_report=copy_cache, **options)
        kept_share = None if compressed_cache is None else self._kept_share(compressed_cache)
        if compressed_cache is not None and self._has_read_full_answer(compressed_cache, answer):
            return answer, kept_share, self._reference.predictions(compressed_cache)
        # Make the predictions in a second request, because the full cache's answer can't be fed to the first request's
        # caches. With sparse attention, the answer's tokens would read all entries of `cache`. With a policy,
        # `compressed_cache` has already read tokens of this method's own answer, which differ from the full cache's.
        options.pop("prompt_progress_callback", None)
        return answer, kept_share, self._reference.generate(**options)  # type: ignore[arg-type]

    def _has_read_full_answer(self, compressed_cache: list, answer: Answer) -> bool:
        """Return whether the answer tokens in a compressed cache are the first tokens of the full cache's answer.

        Args:
            compressed_cache: a copy of the prompt cache that `answer` was decoded from, made at the compression.
            answer: the method's own answer.
        """
        n_fed = n_tokens(compressed_cache) - len(self._tokens)
        return answer.tokens[:n_fed] == self.full.tokens[:n_fed]

    def _figures_of(self, name: str, answer: Answer, read_seconds: float) -> Compared:
        """Return a `Compared` with an answer's own measurements.

        The fields that compare the answer with the full cache's answer keep their defaults.
        """
        times_after_compression = answer.times[answer.n_times_before :]
        tokens_per_second = None
        if len(times_after_compression) > 2:
            decode_seconds = times_after_compression[-1] - times_after_compression[0]
            tokens_per_second = (len(times_after_compression) - 1) / decode_seconds
        return Compared(
            name=name,
            text=answer.text,
            tokens=answer.tokens,
            entries=answer.report.entries or len(self._tokens),
            kv_bytes=answer.report.kv_bytes_after or kv_bytes(answer.cache),
            first_token_seconds=read_seconds,
            tokens_per_second=tokens_per_second,
        )

    def _kept_share(self, cache: list) -> np.ndarray:
        """Compute `Compared.kept` from a compressed cache."""
        n_prompt = len(self._tokens)
        n_kept = np.zeros(n_prompt)
        n_heads = 0
        for layer in attention_layers(self._model, cache):
            positions = np.array(layer.layer_cache_in(cache).held().positions[0])  # (n_kv_heads, n)
            # The cache may also contain entries of the answer.
            n_kept += np.bincount(positions.ravel(), minlength=n_prompt)[:n_prompt]
            n_heads += len(positions)
        return n_kept / n_heads


def _difference(
    tokenizer: Any, full_tokens: list[int], tokens: list[int]
) -> tuple[int, str, str, str] | None:
    """Find the first difference between two answers, as in `Compared.differs`."""
    if tokens == full_tokens:
        return None
    n_same = common_prefix([full_tokens, tokens])
    text_before = tokenizer.decode(full_tokens[max(0, n_same - N_CONTEXT_TOKENS) : n_same])
    # If an answer has only `n_same` tokens, the text of its next token is empty.
    full_token_text = tokenizer.decode(full_tokens[n_same : n_same + 1])
    token_text = tokenizer.decode(tokens[n_same : n_same + 1])
    return n_same, text_before, full_token_text, token_text
