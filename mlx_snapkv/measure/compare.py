"""One prompt answered by several methods, each answer beside the full cache's."""

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
from .divergence import Reference
from .methods import Method
from .reading import AnyPolicy, Reading, n_ahead, read_once
from .reading import n_before as decoded_before

BEFORE = 8  # tokens shown before the first that differs


Kept = tuple[list, CompressionReport | None]  # None if what it has not been fed is compressed, too


@dataclass(frozen=True)
class Answer:
    """A greedy answer."""

    text: str
    tokens: list[int]  # with the one that ends it, if that came
    cache: list  # the prompt cache that it was given; with sparse attention, of all entries
    report: CompressionReport
    times: list[float]  # when decoding began, and when each token came that was decoded
    n_before: int  # so many of these are before the compression


def decode(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    begun: Sequence[int],
    kept: Kept,
    max_tokens: int,
    on_text: Callable[[str], None] = lambda text: None,
    on_report: Callable[[CompressionReport], None] = lambda report: None,
    **options: Any,
) -> Answer:
    """The greedy answer that goes on from a cache which has been fed the first tokens of prompt and answer.

    Args:
        begun: the answer's first tokens.
        on_text: called with the text as it comes, without the token that ends it.
        on_report: called when a prompt has been compressed.
        **options: of `stream_generate`, where what is kept has no report yet.
    """
    cache, report = kept
    detokenizer, stops = tokenizer.detokenizer, tokenizer.eos_token_ids
    tokens: list[int] = []
    times = [time.perf_counter()]
    n_before = 0

    def compressed(found: CompressionReport) -> None:
        nonlocal n_before, report
        report, n_before = found, len(times)
        on_report(found)

    def decoded() -> Iterator[int]:
        rest = [*prompt, *begun][held_tokens(model, cache) :]
        keywords = {"on_report": compressed, **options} if report is None else {}
        n_left = max_tokens - len(begun)
        for response in stream_generate(
            model, tokenizer, rest, n_left, prompt_cache=cache, **keywords
        ):
            times.append(time.perf_counter())
            yield response.token

    ended = len(begun) >= max_tokens or (begun and begun[-1] in stops)
    for token in itertools.chain(begun, [] if ended else decoded()):
        tokens.append(token)
        if token not in stops:
            detokenizer.add_token(token)
            on_text(detokenizer.last_segment)
    detokenizer.finalize()
    on_text(detokenizer.last_segment)
    assert report is not None
    return Answer(detokenizer.text, tokens, cache, report, times, n_before)


@dataclass(frozen=True)
class Compared:
    """What came of a method."""

    name: str
    text: str
    tokens: list[int]  # of the answer, with the one that ends it if that came
    entries: int  # per KV head, the most of any layer
    kv_bytes: int  # of all layers
    # From the first token read; methods that choose from one reading share it.
    first_token_seconds: float
    tokens_per_second: float | None  # decoded from what was kept; None if too few were
    # To the full cache over its answer, from the first token after the compression on: the mean in nats a token, as
    # `eval fidelity --setting known` has it; None if the answer ends before.
    kl: float | None = 0.0
    n_before: int = 0  # tokens of an answer that are decoded before the compression
    uncompressed: str | None = None  # why no token is decoded after the compression, if so
    # The first token that is not the full cache's: its place, the text before it, the full cache's token, and this one.
    differs: tuple[int, str, str, str] | None = None
    reason: str | None = None  # why nothing was evicted, if so
    # By token of the prompt, the share of layers and heads that keep it, `(n,)`; None with a memory.
    kept: np.ndarray | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same, without `kept`."""
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
    """A prompt's greedy answers, those of `generate`; it is read once for all methods that choose from full caches.

    Args:
        methods: the full cache first, by whose answer the others' are judged.
        max_tokens: of an answer, at most.
        on_text: called with a method's name and its answer's text as it comes.
        **options: `prefill_step_size` and `prompt_progress_callback`, of every reading.
    """
    prompt = _Prompt(model, tokenizer, tokens, max_tokens, on_text, options)
    started = time.perf_counter()
    policies = [method.policy for method in methods if method.shares_reading]
    reading = read_once(model, tokens, policies, **options)
    read_seconds = time.perf_counter() - started
    name = methods[0].name
    answer = prompt.decode(name, reading.answer(1), reading.compressed(None))
    full = _compared(name, answer, len(tokens), read_seconds)
    yield full
    reference = Reference(reading, full.tokens)
    for method in methods[1:]:
        plan = plan_request(
            model,
            CompressionConfig(method.policy),
            len(tokens),
            max_tokens=max_tokens,
        )
        if plan.reason is not None:
            on_text(method.name, full.text)
            yield replace(full, name=method.name, reason=plan.reason)
        elif method.shares_reading:
            attempt = _from_reading(prompt, method, reading, read_seconds, full, reference)
            yield _judged(prompt, method, attempt, full, reference)
        else:
            attempt = _from_own_reading(prompt, method, reference)
            yield _judged(prompt, method, attempt, full, reference)


@dataclass(frozen=True)
class _Prompt:
    """What all methods answer, and where the texts of their answers go; `options` are those of every reading."""

    model: Any
    tokenizer: Any
    tokens: Sequence[int]
    max_tokens: int
    on_text: Callable[[str, str], None]
    options: dict[str, Any]

    def decode(self, name: str, begun: Sequence[int], kept: Kept, **options: Any) -> Answer:
        return decode(
            self.model,
            self.tokenizer,
            self.tokens,
            begun,
            kept,
            self.max_tokens,
            partial(self.on_text, name),
            **options,
        )


class _Attempt(NamedTuple):
    """A method's answer, what it kept of the prompt, and what it predicts where the full cache's answer goes on."""

    compared: Compared
    kept: np.ndarray | None
    logprobs: mx.array  # `(m, vocab_size)` for the last `m` tokens of the full cache's answer


def _from_reading(
    prompt: _Prompt,
    method: Method,
    reading: Reading,
    read_seconds: float,
    full: Compared,
    reference: Reference,
) -> _Attempt:
    """The answer of a policy that chooses from the reading that it shares."""
    n = len(prompt.tokens)
    cache, report = reading.compressed(method.policy, answering=True)
    held = copy.deepcopy(cache)  # before anything is decoded from it
    begun = full.tokens[: held_tokens(prompt.model, cache) - n + 1]
    answer = prompt.decode(method.name, begun, (cache, report))
    compared = _compared(method.name, answer, n, read_seconds)
    return _Attempt(compared, _share_kept(prompt.model, held, n), reference.predictions(held))


def _from_own_reading(prompt: _Prompt, method: Method, reference: Reference) -> _Attempt:
    """The answer of a method that reads the prompt for itself."""
    n, policy = len(prompt.tokens), method.policy
    cache = make_prompt_cache(prompt.model)
    held: list[list] = []  # what was kept, before anything is decoded from it

    def hold(report: CompressionReport) -> None:
        if not method.options:
            held.append(copy.deepcopy(cache))

    options = {"policy": policy, **method.options, **prompt.options}
    answer = prompt.decode(method.name, [], (cache, None), on_report=hold, **options)
    kept = _share_kept(prompt.model, held[0], n) if held else None
    if held and not n_ahead(policy):
        logprobs = reference.predictions(held[0])
    else:
        options.pop("prompt_progress_callback", None)
        logprobs = reference.generated(**options)  # type: ignore[arg-type]
    return _Attempt(_compared(method.name, answer, n, None), kept, logprobs)


def _judged(
    prompt: _Prompt, method: Method, attempt: _Attempt, full: Compared, reference: Reference
) -> Compared:
    """A method's answer beside the full cache's."""
    policy: Any = method.policy
    n_before = len(full.tokens) - len(attempt.logprobs)
    if not len(attempt.logprobs) and not method.options:
        n_before = decoded_before(prompt.model, policy, len(prompt.tokens))
    kl = reference.figures(attempt.logprobs)["kl"]
    return replace(
        attempt.compared,
        kl=None if kl is None else float(kl),
        n_before=n_before,
        uncompressed=_not_yet(policy, len(full.tokens), n_before) if kl is None else None,
        kept=attempt.kept,
        differs=_difference(prompt.tokenizer, full.tokens, attempt.compared.tokens),
    )


def _not_yet(policy: AnyPolicy, n: int, n_before: int) -> str:
    where = (
        "the entries that block prefill kept"
        if isinstance(policy, Compress) and policy.evicts_in_blocks
        else "all entries"
    )
    looks = n_ahead(policy)
    who = (
        f"lookahead decodes the first {n_before}" if looks else f"the first {n_before} are decoded"
    )
    return f"not compressed yet: the answer has {n} tokens, {who} on {where}"


def _compared(name: str, answer: Answer, n_prompt: int, read_seconds: float | None) -> Compared:
    times = answer.times[answer.n_before :]
    if read_seconds is None:  # the answer's own: it was asked with a new cache
        read_seconds = answer.times[1] - answer.times[0]
    return Compared(
        name,
        answer.text,
        answer.tokens,
        entries=answer.report.entries or n_prompt,
        kv_bytes=answer.report.kv_bytes_after or kv_bytes(answer.cache),
        first_token_seconds=read_seconds,
        tokens_per_second=(len(times) - 1) / (times[-1] - times[0]) if len(times) > 2 else None,
    )


def _share_kept(model: Any, cache: list, n: int) -> np.ndarray:
    layers = attention_layers(model, cache)
    held = [np.array(layer.entries_in(cache).held().positions[0]) for layer in layers]
    counts = np.bincount(np.concatenate([rows.ravel() for rows in held]), minlength=n)[:n]
    return counts / sum(map(len, held))


def _difference(
    tokenizer: Any, full: list[int], tokens: list[int]
) -> tuple[int, str, str, str] | None:
    pairs = enumerate(itertools.zip_longest(full, tokens))
    i = next((i for i, (theirs, ours) in pairs if theirs != ours), None)
    if i is None:
        return None
    parts = full[max(0, i - BEFORE) : i], full[i : i + 1], tokens[i : i + 1]
    before, theirs, ours = map(tokenizer.decode, parts)
    return i, before, theirs, ours
