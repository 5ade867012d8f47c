"""Answer one prompt with several methods, and compare each answer with the full cache's."""

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers, held_tokens, kv_bytes
from ..compress.options import Compress
from ..engine.generate import stream_generate
from ..engine.report import CompressionReport
from ..planning.config import CompressionConfig
from ..planning.request_plan import plan_request
from ..planning.settings import Setting
from .divergence import Reference
from .methods import Method
from .reading import lookahead_of, n_decoded_before, read_once

N_CONTEXT_TOKENS = 8  # answer tokens shown before the first difference


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    Attributes:
        tokens: the answer's tokens, with the end-of-sequence token if the model gave it.
        cache: the prompt cache after the answer; with sparse attention, the cache with all entries.
        times: the times (seconds) when decoding began, and when each decoded token came.
        n_times_before: how many of `times` were noted before the compression.
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
    begun: Sequence[int] = (),
    on_text: Callable[[str], None] = lambda text: None,
    on_report: Callable[[CompressionReport], None] = lambda report: None,
    **options: Any,
) -> Answer:
    """Answer a prompt greedily, from a cache that has read the first tokens of the prompt, or of prompt and answer.

    Args:
        model: an mlx-lm model.
        tokenizer: its tokenizer.
        prompt: all token ids of the prompt, those in `cache` included.
        max_tokens: limit of the answer's tokens, `begun` included.
        cache: the prompt cache to decode from.
        report: the report of the cache's compression. None if the cache is not compressed yet: the other tokens are
            read and compressed by `stream_generate`.
        begun: the first tokens of the answer, if they are known.
        on_text: receives each new part of the answer's text; the end-of-sequence token has no text.
        on_report: receives the report if the prompt is compressed here.
        **options: keywords of `stream_generate`, used only without a `report`.
    """
    detokenizer = tokenizer.detokenizer
    stops = tokenizer.eos_token_ids
    tokens: list[int] = []
    times = [time.perf_counter()]
    n_times_before = 0

    def note_report(new_report: CompressionReport) -> None:
        nonlocal n_times_before, report
        report = new_report
        n_times_before = len(times)
        on_report(new_report)

    def new_tokens() -> Iterator[int]:
        unread = [*prompt, *begun][held_tokens(model, cache) :]
        keywords = {"on_report": note_report, **options} if report is None else {}
        n_left = max_tokens - len(begun)
        for response in stream_generate(
            model, tokenizer, unread, n_left, prompt_cache=cache, **keywords
        ):
            times.append(time.perf_counter())
            yield response.token

    has_ended = len(begun) >= max_tokens or (begun and begun[-1] in stops)
    continuation = iter(()) if has_ended else new_tokens()
    for token in itertools.chain(begun, continuation):
        tokens.append(token)
        if token not in stops:
            detokenizer.add_token(token)
            on_text(detokenizer.last_segment)
    detokenizer.finalize()
    on_text(detokenizer.last_segment)
    assert report is not None
    return Answer(
        text=detokenizer.text,
        tokens=tokens,
        cache=cache,
        report=report,
        times=times,
        n_times_before=n_times_before,
    )


@dataclass(frozen=True)
class Compared:
    """A method's answer, compared with the full cache's.

    Attributes:
        tokens: the answer's tokens, with the end-of-sequence token if the model gave it.
        entries: entries per KV head in the layer with the most.
        kv_bytes: bytes of keys and values in all layers.
        first_token_seconds: seconds from the first token read to the first token of the answer. Methods that share one
            reading have the same figure.
        tokens_per_second: speed of the tokens decoded after the compression; None if there are too few.
        kl: mean divergence from the full cache over the full cache's answer, in nats per token, from the first token
            after the compression on (the figure of `eval fidelity --setting known`). None if the answer ends before.
        n_before: answer tokens that are decoded before the compression.
        uncompressed: a sentence if the answer ends before the compression, else None.
        differs: where the answer first differs from the full cache's: the token's index, the text before it, the full
            cache's token and this answer's token, as texts. None if the answers are equal.
        reason: why no entry was evicted; None if entries were evicted.
        kept: `(n_prompt,)`, for each prompt token the share of layers and KV heads that keep its entry; None for
            methods with options, such as the `store` of sparse attention.
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
    """Yield the greedy answer of each method to a prompt, as `generate` gives it.

    The prompt is read once for all methods that choose from full caches.

    Args:
        model: an mlx-lm model.
        tokenizer: its tokenizer.
        tokens: the prompt's token ids.
        methods: the full cache, and then the methods that are compared with it.
        max_tokens: limit of each answer.
        on_text: receives a method's name and each new part of its answer's text.
        **options: `prefill_step_size` and `prompt_progress_callback` of each reading.
    """
    comparison = _Comparison(model, tokenizer, tokens, methods, max_tokens, on_text, options)
    yield comparison.full
    for method in methods[1:]:
        yield comparison.compared(method)


class _Attempt(NamedTuple):
    """A method's answer, and what its cache kept and predicted before the answer was decoded.

    Attributes:
        kept: see `Compared.kept`.
        logprobs: `(m, vocab_size)`, the log-probabilities for the last `m` tokens of the full cache's answer.
    """

    answer: Answer
    kept: np.ndarray | None
    logprobs: mx.array


class _Comparison:
    """One prompt and the full cache's answer to it; the arguments are those of `compare`.

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
        cache, report = self._reading.compressed(None)
        answer = self._decode(name, cache, report, begun=self._reading.answer(1))
        self.full = self._figures(name, answer, self._read_seconds)
        self._reference = Reference(self._reading, self.full.tokens)

    def compared(self, method: Method) -> Compared:
        """Answer the prompt with a method, and compare the answer with the full cache's."""
        plan = plan_request(
            self._model,
            CompressionConfig(method.policy),
            len(self._tokens),
            max_tokens=self._max_tokens,
        )
        if plan.reason is not None:
            self._on_text(method.name, self.full.text)
            return replace(self.full, name=method.name, reason=plan.reason)
        if method.shares_reading:
            return self._judged(method, self._answer_from_reading(method), self._read_seconds)
        attempt = self._answer_by_itself(method)
        seconds = attempt.answer.times[1] - attempt.answer.times[0]
        return self._judged(method, attempt, seconds)

    def _decode(
        self, name: str, cache: list, report: CompressionReport | None = None, **options: Any
    ) -> Answer:
        """Answer the prompt by `decode`, and hand the answer's text to `on_text` with the method's name."""
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

    def _answer_from_reading(self, method: Method) -> _Attempt:
        """Answer with a policy that compresses the shared reading."""
        cache, report = self._reading.compressed(method.policy, answering=True)
        compressed = copy.deepcopy(cache)  # for the predictions, since the answer changes the cache
        # The cache has been fed answer tokens, and predicts one more than that.
        n_begun = held_tokens(self._model, cache) - len(self._tokens) + 1
        answer = self._decode(method.name, cache, report, begun=self.full.tokens[:n_begun])
        kept = self._share_kept(compressed)
        return _Attempt(answer=answer, kept=kept, logprobs=self._reference.predictions(compressed))

    def _answer_by_itself(self, method: Method) -> _Attempt:
        """Answer with a method that reads the prompt itself."""
        cache = make_prompt_cache(self._model)
        compressed: list | None = None

        def copy_cache(report: CompressionReport) -> None:
            nonlocal compressed
            if not method.options:
                compressed = copy.deepcopy(cache)

        options = {"policy": method.policy, **method.options, **self._options}
        answer = self._decode(method.name, cache, on_report=copy_cache, **options)
        kept = None if compressed is None else self._share_kept(compressed)
        # Sparse attention's cache has all entries, and each token of a request chooses among them.
        evicts = isinstance(method.policy, Compress)
        if compressed is not None and evicts and not lookahead_of(method.policy):
            logprobs = self._reference.predictions(compressed)
        else:
            options.pop("prompt_progress_callback", None)
            logprobs = self._reference.generated(**options)  # type: ignore[arg-type]
        return _Attempt(answer=answer, kept=kept, logprobs=logprobs)

    def _judged(self, method: Method, attempt: _Attempt, read_seconds: float) -> Compared:
        """Return a method's figures, compared with the full cache's answer."""
        policy: Any = method.policy
        full = self.full.tokens
        n_before = len(full) - len(attempt.logprobs)
        if not len(attempt.logprobs) and not method.options:
            n_before = n_decoded_before(self._model, policy, len(self._tokens))
        kl = self._reference.figures(attempt.logprobs)["kl"]
        return replace(
            self._figures(method.name, attempt.answer, read_seconds),
            kl=None if kl is None else float(kl),
            n_before=n_before,
            uncompressed=_why_uncompressed(policy, len(full), n_before) if kl is None else None,
            kept=attempt.kept,
            differs=_difference(self._tokenizer, full, attempt.answer.tokens),
        )

    def _figures(self, name: str, answer: Answer, read_seconds: float) -> Compared:
        """Return an answer's own figures, not yet compared."""
        times = answer.times[answer.n_times_before :]
        tokens_per_second = None
        if len(times) > 2:
            tokens_per_second = (len(times) - 1) / (times[-1] - times[0])
        return Compared(
            name=name,
            text=answer.text,
            tokens=answer.tokens,
            entries=answer.report.entries or len(self._tokens),
            kv_bytes=answer.report.kv_bytes_after or kv_bytes(answer.cache),
            first_token_seconds=read_seconds,
            tokens_per_second=tokens_per_second,
        )

    def _share_kept(self, cache: list) -> np.ndarray:
        """Return `Compared.kept` of a compressed cache."""
        n_prompt = len(self._tokens)
        n_kept = np.zeros(n_prompt)
        n_heads = 0
        for layer in attention_layers(self._model, cache):
            positions = np.array(layer.entries_in(cache).held().positions[0])  # (n_kv_heads, n)
            # The cache may hold entries of the answer, too.
            n_kept += np.bincount(positions.ravel(), minlength=n_prompt)[:n_prompt]
            n_heads += len(positions)
        return n_kept / n_heads


def _why_uncompressed(policy: Setting, n_answer: int, n_before: int) -> str:
    """Return the sentence of `Compared.uncompressed`."""
    if isinstance(policy, Compress) and policy.evicts_in_blocks:
        entries = "the entries that block prefill kept"
    else:
        entries = "all entries"
    if lookahead_of(policy):
        decoding = f"lookahead decodes the first {n_before}"
    else:
        decoding = f"the first {n_before} are decoded"
    return f"not compressed yet: the answer has {n_answer} tokens, {decoding} on {entries}"


def _difference(
    tokenizer: Any, full: list[int], tokens: list[int]
) -> tuple[int, str, str, str] | None:
    """Return `Compared.differs` of two answers' tokens."""
    pairs = itertools.zip_longest(full, tokens)
    first = next((i for i, (theirs, ours) in enumerate(pairs) if theirs != ours), None)
    if first is None:
        return None
    before = tokenizer.decode(full[max(0, first - N_CONTEXT_TOKENS) : first])
    theirs = tokenizer.decode(full[first : first + 1])
    ours = tokenizer.decode(tokens[first : first + 1])
    return first, before, theirs, ours
