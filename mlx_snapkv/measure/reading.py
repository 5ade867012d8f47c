"""A prompt that is read once, for any number of policies.

reading = read_once(model, document, policies, suffixes=[question])
cache, report = reading.compressed(policy)                 # the document, as prefill compresses it
prompt = reading.followed_by(question)                     # document and question; only the question is read
cache, report = prompt.compressed(policy, answering=True)  # as generate_step has it once it has compressed
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..caches.adapter import full_cache
from ..caches.layers import attention_layers, copies_but_entries
from ..compress.options import Compress
from ..compress.recording import RecordingKVCache
from ..engine.prefill import prefill, read
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.request import Request, make_request
from ..entries.queries import Captured
from ..errors import SnapKVError
from ..models import attention_classes
from ..models.patch import recording
from ..planning.config import CompressionConfig
from ..planning.prompt_plan import PREFILL_STEP_SIZE
from ..planning.request_plan import Plan, plan_request
from ..planning.scores import largest_chunk
from ..planning.settings import Setting
from ..sparse.options import Sparse

AnyPolicy = Setting
Recorders = dict[AnyPolicy, list[RecordingKVCache]]  # of a prompt, by full-attention layer
MORE = 256  # tokens that there is room for behind a prompt


def shares_reading(policy: AnyPolicy | None) -> bool:
    """Whether a policy chooses from full caches, by queries that are recorded while others' are; None keeps all.

    Others read for themselves: block policies evict meanwhile, h2o counts all attention, and with sparse attention
    chunks choose what they read.
    """
    if policy is None:
        return True
    chooses_once = isinstance(policy, Compress) and not policy.evicts_in_blocks
    return chooses_once and not policy.decode_policy.accumulates_attention  # type: ignore[union-attr]


def n_ahead(setting: AnyPolicy | None) -> int:
    """Return the number of answer tokens that vote before a policy compresses."""
    return setting.decode_policy.lookahead if isinstance(setting, Compress) else 0


def n_before(model: Any, policy: AnyPolicy, n_prompt: int) -> int:
    """Tokens of an answer that are decoded before its prompt is compressed: one from the prompt, and one from each that
    is fed until then."""
    return _plan(model, policy, n_prompt).n_ahead + 1


class SharedKVCache(RecordingKVCache):
    """A KV cache whose queries several `recorders` of the layer record, which are never fed; see their `filled`."""

    def __init__(self, recorders: Sequence[RecordingKVCache], capacity: int, layer: Any):
        super().__init__(0, 0, capacity, layer)
        self.recorders = recorders

    def record(self, captured: Captured) -> None:
        for recorder in self.recorders:
            recorder.offset = self.offset
            recorder.record(captured)

    @property
    def waits_for_readers(self) -> bool:  # type: ignore[override]
        return any(recorder.waits_for_readers for recorder in self.recorders)

    @property  # type: ignore[misc]  # nothing sets the state of a request under way
    def state(self) -> tuple:
        return *super().state, [x.state for x in self.recorders]


class Reading:
    """A prompt on full caches, with the queries recorded that each policy needs; made by `read_once`.

    What a policy keeps is what `prefill` and `generate_step` keep, whichever others there are.

    Args:
        caches: they lack the prompt's last tokens, `unread`, which are read; `options` are mlx-lm's.
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
        self.model, self.tokens = model, list(tokens)
        self._caches, self._recorders, self._suffixes = caches, recorders, suffixes
        self._layers = attention_layers(model, caches)
        # After so many tokens of the answer policies compress.
        self._n_ahead = {n_before(model, policy, len(tokens)) - 1 for policy in recorders}
        for i, layer in enumerate(self._layers):
            wanted = [r for some in (recorders, *self._suffixes.values()) for r in _at(some, i)]
            before = layer.cache_in(caches)
            shared = SharedKVCache(wanted, len(tokens) + MORE - before.offset, layer)
            if not before.empty():
                shared.share(before, before.offset)
            layer.put(caches, shared)
        # Not in a policy's own chunks: what is read must not depend on who asks.
        given = {"prefill_step_size": largest_chunk(), **options}
        with recording(attention_classes(model)):
            # Log-probabilities `(vocab_size,)` of the token after the prompt.
            self.following = read(model, mx.array(list(unread)), caches, given)[0]
        for i, layer in enumerate(self._layers):
            shared = layer.cache_in(caches)
            shared.step = KVCache.step
            shared.recorders = _at(recorders, i)  # the suffixes' need nothing of the answer
        # By the number of tokens fed: copies of all caches then, but of those of the full-attention layers.
        self._others = {len(tokens): copies_but_entries(caches, self._layers)}
        self._answer = [_best(self.following)]  # greedy: all tokens that were fed, and the next one
        self._forced: list[int] = []  # what it begins with, whatever the model would say

    def followed_by(self, suffix: Sequence[int]) -> "Reading":
        """The prompt with one of its `suffixes` behind it, read on a copy."""
        tokens, recorders = [*self.tokens, *suffix], self._suffixes[tuple(suffix)]
        return Reading(self.model, tokens, self.full(), recorders, {}, suffix)

    def full(self) -> list:
        """A prompt cache with all entries; its arrays are shared until they are written."""
        n = len(self.tokens)
        caches = copies_but_entries(self._others[n], self._layers)
        for layer in self._layers:
            layer.put(caches, full_cache(layer.cache_in(self._caches).held().between(0, n)))
        return caches

    def force(self, tokens: Sequence[int]) -> None:
        """Let the answer begin with these tokens instead of the model's own, before any of it is fed."""
        self._forced = list(tokens)
        self._answer = self._forced[:1]

    def answer(self, n: int, stops: Collection[int] = ()) -> list[int]:
        """The full cache's own greedy answer: at most `n` tokens, up to the first that is one of `stops`."""
        for i in range(n):
            self._feed_answer(i)
            if self._answer[i] in stops:
                return self._answer[: i + 1]
        return self._answer[:n]

    def compressed(
        self, policy: AnyPolicy | None, answering: bool = False
    ) -> tuple[list, CompressionReport]:
        """What `prefill` keeps of the prompt, and its report; the answer's first tokens vote if the policy looks ahead.

        Args:
            policy: None is the full cache.
            answering: what `generate_step` decodes from once it has compressed, which has been fed the full cache's
                answer's first tokens: as many as the policy looks ahead, and at least one.

        Raises: SnapKVError: the prompt was not read for this policy, or its scores are NaN.
        """
        n_prompt = len(self.tokens)
        plan = _plan(self.model, policy, n_prompt)
        if policy is None or plan.reason is not None:
            return self.full(), CompressionReport(str(policy or NO_POLICY), n_prompt, plan.reason)
        if not shares_reading(policy) and not answering:
            return prefill(self.model, self.tokens, policy)
        request = self._request(policy, answering)
        return request.prompt_cache, request.compress()

    def _request(self, policy: AnyPolicy, answering: bool) -> Request:
        """One whose caches hold what `compressed` compresses, and who votes on it."""
        if policy not in self._recorders:
            raise SnapKVError(f"the prompt was not read for {policy}: give it to read_once")
        n_prompt = len(self.tokens)
        request = make_request(self.model, _plan(self.model, policy, n_prompt))
        n = n_prompt + (request.plan.n_ahead if answering else 0)
        self._feed_answer(max(n, request.plan.last) - n_prompt)
        caches = copies_but_entries(self._others[n], self._layers)
        for layer, recorder in zip(self._layers, self._recorders[policy]):
            layer.put(caches, recorder.filled(layer.cache_in(self._caches), n))
        request.caches = caches
        return request

    def _feed_answer(self, n: int) -> None:
        """Feed the answer's first `n` tokens, whatever they are, unless that was done."""
        while (fed := len(self._answer) - 1) < n:
            token = mx.array([[self._answer[fed]]])
            with recording(attention_classes(self.model)):
                logits = self.model(token, cache=self._caches)[0, -1]
            mx.eval(logits, [c.state for c in self._caches])
            forced = self._forced[fed + 1 : fed + 2]
            self._answer += forced or [_best(logits)]
            if fed + 1 in self._n_ahead:
                n_fed = len(self.tokens) + fed + 1
                self._others[n_fed] = copies_but_entries(self._caches, self._layers)


def read_once(
    model: Any,
    tokens: Sequence[int],
    policies: Iterable[AnyPolicy | None] = (),
    suffixes: Iterable[Sequence[int]] = (),
    **options: Any,
) -> Reading:
    """Read a prompt on full caches, and record the queries that each policy needs.

    Args:
        policies: all that will be asked for.
        suffixes: token ids that may follow it, which `Reading.followed_by` reads.
        **options: of mlx-lm's `generate_step`; by default, chunks are of `largest_chunk()` tokens.

    Raises: SnapKVError: the model is not supported, or a budget has no room for what is always kept.
    """
    sharing = [p for p in dict.fromkeys(policies) if p and shares_reading(p)]
    n = len(tokens)
    after = {tuple(more): _recorders(model, n + len(more), sharing) for more in suffixes}
    caches, own = make_prompt_cache(model), _recorders(model, n, sharing)
    return Reading(model, tokens, caches, own, after, tokens, **options)


def read_sparsely(
    model: Any, sparse: Sparse, tokens: Sequence[int], later: Sequence[int] = ()
) -> tuple[list, CompressionReport]:
    """Caches whose tokens choose what they read of a prompt, and of more that is read `later`, and the report."""
    before, new = None, tokens
    if later:
        (before, _), new = prefill(model, tokens, sparse=sparse), later
    plan = plan_request(model, CompressionConfig(sparse), len(new), before)
    options = {"prefill_step_size": plan.chunk_size(PREFILL_STEP_SIZE)}
    if plan.reason is not None:
        caches = before or make_prompt_cache(model)
        read(model, mx.array(list(new)), caches, options)
        return caches, CompressionReport.of_full_cache(plan)
    request = make_request(model, plan, before)
    with request.recording():
        read(request.model, mx.array(list(new)), request.caches, options)
    report = request.compress()
    return request.caches, report


def _best(logits: mx.array) -> int:
    return int(mx.argmax(logits).item())  # type: ignore[arg-type]


def _plan(model: Any, policy: AnyPolicy | None, n_prompt: int) -> Plan:
    """That of a prompt on an empty cache."""
    return plan_request(model, CompressionConfig(policy), n_prompt)


def _recorders(model: Any, n_prompt: int, policies: list[AnyPolicy]) -> Recorders:
    """What is to be recorded of a prompt of so many tokens for the policies that compress it, each thing once."""
    recorders: Recorders = {}
    by_range: dict[tuple, list[RecordingKVCache]] = {}
    for policy in policies:
        plan = _plan(model, policy, n_prompt)
        if plan.reason is None:
            caches = make_request(model, plan).caches
            own = [layer.cache_in(caches) for layer in attention_layers(model, caches)]
            recorded = own[0].first, own[0].last, own[0].statistics_from
            recorders[policy] = by_range.setdefault(recorded, own)
    return recorders


def _at(recorders: Recorders, i: int) -> list[RecordingKVCache]:
    """Those of the `i`th layer, each once."""
    return list({id(by_layer[i]): by_layer[i] for by_layer in recorders.values()}.values())
