"""Read a prompt once and compress it with any number of policies.

reading = read_once(model, document, policies, suffixes=[question])
cache, report = reading.compress(policy)                 # the document's cache, as `prefill` returns it
prompt = reading.followed_by(question)                   # document and question; only the question is read
cache, report = prompt.compress(policy, answering=True)  # `generate_step`'s cache after compression
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..caches.adapter import full_cache
from ..caches.layers import attention_layers, copies_sharing_entries
from ..compress.options import Compress
from ..compress.recording import RecordingKVCache
from ..engine.prefill import prefill, read
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.request import Request
from ..entries.queries import CapturedQueries
from ..errors import SnapKVError
from ..models import attention_classes
from ..models.patch import recording
from ..planning.config import CompressionConfig
from ..planning.request_plan import Plan, plan_request
from ..planning.scores import largest_chunk
from ..planning.settings import Setting

# Each policy's recording caches, one per full-attention layer.
Recorders = dict[Setting, list[RecordingKVCache]]
ANSWER_CAPACITY = 256  # number of answer tokens to preallocate buffers for


def shares_reading(setting: Setting | None) -> bool:
    """Return whether a policy can choose its entries from full caches that it shares with other policies.

    Also return True for the full cache (None). Some settings need a separate pass over the prompt: block policies evict
    during prefill, h2o accumulates the attention of all queries, and sparse attention reads into caches of its own.
    """
    if setting is None:
        return True
    chooses_once = isinstance(setting, Compress) and not setting.evicts_in_blocks
    return chooses_once and not setting.decode_policy.accumulates_attention  # type: ignore[union-attr]


def lookahead_of(setting: Setting | None) -> int:
    """Return the number of answer tokens that vote before compression."""
    return setting.decode_policy.lookahead if isinstance(setting, Compress) else 0


class SharedKVCache(RecordingKVCache):
    """One layer's full KV cache, which passes the queries of new tokens to several `recorders`.

    The recorders contain no entries. `RecordingKVCache.with_entries_of` combines their queries with this cache's
    entries.
    """

    def __init__(self, recorders: Sequence[RecordingKVCache], capacity: int, layer: Any):
        """Create an empty cache with space for `capacity` entries."""
        super().__init__(0, 0, capacity, layer)
        self.recorders = recorders

    def record(self, captured: CapturedQueries) -> None:
        """Pass the queries of an attention call, and the position of the next token, to every recorder."""
        for recorder in self.recorders:
            recorder.offset = self.offset
            recorder.record(captured)

    @property
    def waits_for_readers(self) -> bool:  # type: ignore[override]
        """Return whether any recorder is still waiting for queries from other layers that read these entries."""
        return any(recorder.waits_for_readers for recorder in self.recorders)

    @property  # type: ignore[misc]  # no setter: nothing sets the state while a request runs
    def state(self) -> tuple:
        """Return the entries and recorded queries for mlx-lm's prefill loop to evaluate."""
        return *super().state, [recorder.state for recorder in self.recorders]


class Reading:
    """A prompt read into full caches, with the queries that each policy needs. See `read_once`.

    `compress` keeps the same entries as `prefill` and `generate_step`, no matter which other policies share the
    reading.

    Args:
        model: an mlx-lm model.
        tokens: token ids of the whole prompt.
        caches: caches that have read the prompt up to the `unread` tokens.
        recorders: each policy's recording caches.
        suffixes: for each suffix that `followed_by` can append, recorders for the longer prompt.
        unread: the prompt's last tokens (at least one). The constructor reads them.
        **options: keyword arguments for mlx-lm's `generate_step`, used for prefill.

    Attributes:
        next_logprobs: log-probabilities `(vocab_size,)` of the token after the prompt.
    """

    def __init__(
        self,
        model: Any,
        tokens: Sequence[int],
        caches: list,
        recorders: Recorders,
        suffixes: Mapping[tuple[int, ...], Recorders],
        unread: Sequence[int],
        **options: Any,
    ):
        """Read the `unread` tokens, while every recorder records the queries that its policy needs."""
        self.model = model
        self.tokens = list(tokens)
        self._caches = caches
        self._recorders = recorders
        self._suffixes = suffixes
        self._layers = attention_layers(model, caches)
        # How many answer tokens are fed before each policy compresses. The caches are copied at these points.
        self._copy_points = {
            _plan_prompt(model, policy, len(tokens)).n_fed_before_compression
            for policy in recorders
        }
        self._share_caches()
        # The chunk size does not depend on the policies, so the entries don't either.
        prefill_options = {"prefill_step_size": largest_chunk(), **options}
        with recording(attention_classes(model)):
            logprobs = read(model, mx.array(list(unread)), caches, prefill_options)
        self.next_logprobs = logprobs[0]  # the only sequence in the batch
        for i, layer in enumerate(self._layers):
            shared_cache = layer.cache_in(caches)
            shared_cache.step = KVCache.step
            # From now on, the model reads only answer tokens. The suffixes' recorders must not record them, so keep
            # only the policies' recorders.
            shared_cache.recorders = _layer_recorders(recorders, i)
        # Copies of the caches, keyed by the number of tokens that they have read. Full-attention layers' caches are not
        # copied, because entries are only ever appended to them.
        self._cache_copies = {len(tokens): copies_sharing_entries(caches, self._layers)}
        # The answer tokens fed so far, followed by the next token.
        self._answer = [_most_likely(self.next_logprobs)]
        self._forced: list[int] = []  # see `force`

    def _share_caches(self) -> None:
        """Replace the caches of full-attention layers with caches that all recorders share."""
        for i, layer in enumerate(self._layers):
            layer_recorders = _layer_recorders(self._recorders, i)
            for suffix_recorders in self._suffixes.values():
                layer_recorders += _layer_recorders(suffix_recorders, i)
            cache = layer.cache_in(self._caches)
            n_read = cache.offset
            capacity = len(self.tokens) + ANSWER_CAPACITY - n_read
            shared_cache = SharedKVCache(layer_recorders, capacity, layer)
            if n_read > 0:
                shared_cache.share_entries_of(cache, n_read)
            layer.put(self._caches, shared_cache)

    def followed_by(self, suffix: Sequence[int]) -> "Reading":
        """Read one of the `suffixes` after the prompt, into copies of the caches, and return the new reading."""
        return Reading(
            self.model,
            tokens=[*self.tokens, *suffix],
            caches=self.full_cache(),
            recorders=self._suffixes[tuple(suffix)],
            suffixes={},
            unread=suffix,
        )

    def full_cache(self) -> list:
        """Return a prompt cache with all prompt entries. It shares the reading's arrays, which are copied on write."""
        n_prompt = len(self.tokens)
        caches = copies_sharing_entries(self._cache_copies[n_prompt], self._layers)
        for layer in self._layers:
            entries = layer.cache_in(self._caches).held()  # including the answer's entries
            layer.put(caches, full_cache(entries.between(0, n_prompt)))
        return caches

    def force(self, tokens: Sequence[int]) -> None:
        """Start the answer with `tokens` instead of the model's predictions.

        Call this before `answer` and `compress`.
        """
        self._forced = list(tokens)
        self._answer = self._forced[:1]

    def answer(self, max_tokens: int, stop_tokens: Collection[int] = ()) -> list[int]:
        """Return the full cache's greedy answer of at most `max_tokens` tokens.

        The answer ends after the first token that is in `stop_tokens`.
        """
        for i in range(max_tokens):
            self._feed_answer(i)  # predicts answer token `i`
            if self._answer[i] in stop_tokens:
                return self._answer[: i + 1]
        return self._answer[:max_tokens]

    def compress(
        self, policy: Setting | None, answering: bool = False
    ) -> tuple[list, CompressionReport]:
        """Return the prompt cache and the report that `prefill` would return for a policy.

        If the policy has a lookahead, the first tokens of the full cache's answer vote too.

        Args:
            policy: one of the policies passed to `read_once`, or None for the full cache.
            answering: if True, return the cache that `generate_step` decodes from after compression. That cache has
                also read the first `max(1, lookahead)` answer tokens. If nothing is compressed, `answering` has no
                effect.

        Raises: SnapKVError: the prompt was not read for this policy, or its scores are NaN.
        """
        n_prompt = len(self.tokens)
        plan = _plan_prompt(self.model, policy, n_prompt)
        if policy is None or plan.is_left_to_mlx_lm:
            name = NO_POLICY if policy is None else str(policy)
            return self.full_cache(), CompressionReport(name, n_prompt, plan.reason)
        reads_by_itself = not shares_reading(policy)
        if reads_by_itself and not answering:
            return prefill(self.model, self.tokens, policy)
        request = self._request_to_compress(policy, answering)
        report = request.compress()
        return request.prompt_cache, report

    def _request_to_compress(self, policy: Setting, answering: bool) -> Request:
        """Return a request whose prompt has been read but not compressed; see `compress`."""
        if policy not in self._recorders:
            raise SnapKVError(f"the prompt was not read for {policy}: give it to read_once")
        n_prompt = len(self.tokens)
        request = Request(self.model, _plan_prompt(self.model, policy, n_prompt))
        n_read = n_prompt
        if answering:
            n_read += request.plan.n_fed_before_compression
        # Feed the answer tokens that vote or that the caches must have read.
        self._feed_answer(max(n_read, request.plan.voters.stop) - n_prompt)
        caches = copies_sharing_entries(self._cache_copies[n_read], self._layers)
        for layer, recorder in zip(self._layers, self._recorders[policy]):
            shared_cache = layer.cache_in(self._caches)
            layer.put(caches, recorder.with_entries_of(shared_cache, n_read))
        request.caches = caches
        return request

    def _feed_answer(self, n_tokens: int) -> None:
        """Feed answer tokens until `n_tokens` of them have been fed."""
        while len(self._answer) <= n_tokens:  # the last token has not been fed yet
            token = mx.array([[self._answer[-1]]])
            with recording(attention_classes(self.model)):
                logits = self.model(token, cache=self._caches)[0, -1]  # (vocab_size,)
            mx.eval(logits, [cache.state for cache in self._caches])
            n_fed = len(self._answer)
            if n_fed < len(self._forced):
                self._answer.append(self._forced[n_fed])
            else:
                self._answer.append(_most_likely(logits))
            if n_fed in self._copy_points:
                n_read = len(self.tokens) + n_fed
                self._cache_copies[n_read] = copies_sharing_entries(self._caches, self._layers)


def read_once(
    model: Any,
    tokens: Sequence[int],
    policies: Iterable[Setting | None] = (),
    suffixes: Iterable[Sequence[int]] = (),
    **options: Any,
) -> Reading:
    """Read a prompt into full caches and record the queries that each policy needs.

    Args:
        model: an mlx-lm model.
        tokens: token ids of the prompt.
        policies: policies that can be passed to `Reading.compress`.
        suffixes: token ids of each text that `Reading.followed_by` can append to the prompt.
        **options: keyword arguments for mlx-lm's `generate_step`. By default, chunks have `largest_chunk()` tokens.

    Raises: SnapKVError: the model is not supported, or does not support one of the policies.
    """
    unique_policies = dict.fromkeys(policies)
    # Policies that can't share a reading need no recorders.
    recorded_policies = [
        policy for policy in unique_policies if policy is not None and shares_reading(policy)
    ]
    n_tokens = len(tokens)
    suffix_recorders = {
        tuple(suffix): _make_recorders(model, n_tokens + len(suffix), recorded_policies)
        for suffix in suffixes
    }
    return Reading(
        model,
        tokens=tokens,
        caches=make_prompt_cache(model),
        recorders=_make_recorders(model, n_tokens, recorded_policies),
        suffixes=suffix_recorders,
        unread=tokens,
        **options,
    )


def _most_likely(logits: mx.array) -> int:
    return int(mx.argmax(logits).item())  # type: ignore[arg-type]


def _plan_prompt(model: Any, policy: Setting | None, n_prompt: int) -> Plan:
    """Return the plan for a prompt that is read into an empty cache."""
    return plan_request(model, CompressionConfig(policy), n_prompt)


def _make_recorders(model: Any, n_prompt: int, policies: list[Setting]) -> Recorders:
    """Return recording caches for each policy that would compress a prompt of `n_prompt` tokens.

    Policies that need the same queries share caches.
    """
    recorders: Recorders = {}
    # (first, last, statistics_from) of the recorded queries -> caches
    recorders_by_queries: dict[tuple, list[RecordingKVCache]] = {}
    for policy in policies:
        plan = _plan_prompt(model, policy, n_prompt)
        if not plan.is_left_to_mlx_lm:
            caches = Request(model, plan).caches
            layer_caches = [layer.cache_in(caches) for layer in attention_layers(model, caches)]
            any_cache = layer_caches[0]  # all layers record the same positions
            recorded_queries = any_cache.first, any_cache.last, any_cache.statistics_from
            recorders[policy] = recorders_by_queries.setdefault(recorded_queries, layer_caches)
    return recorders


def _layer_recorders(recorders: Recorders, i: int) -> list[RecordingKVCache]:
    """Return the distinct recorders of full-attention layer `i`."""
    recorder_by_id = {}
    for policy_recorders in recorders.values():
        recorder = policy_recorders[i]
        recorder_by_id[id(recorder)] = recorder
    return list(recorder_by_id.values())
