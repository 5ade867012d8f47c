"""What verified answers cost: tokens of each way in turn, at given rates of votes and of right drafts."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..caches.decode import decode_cache
from ..caches.layers import attention_layers, kv_bytes
from ..caches.memories import recalling_caches
from ..caches.recollection import Recollection
from ..engine.checked import Checked
from ..engine.gathering import Gathering
from ..engine.report import Verified
from ..engine.unsure import top_probability
from ..models import attention_classes
from ..models.patch import recording
from ..policies import Policy
from .contenders import Contender, decoding_cache

VOTES = (0.0, 0.1, 0.3, 1.0)  # by token
RIGHT = (0.5, 0.7, 0.9)  # drafts, each
WARM_UP = 4

Step = Callable[[], Any]


class _Answer:
    """A prompt of random entries, and the small caches of its layers."""

    def __init__(self, model, context: int, policy: Policy, verify: str):
        self.model = model
        full = decoding_cache(model, Contender("full cache", "full", context), context)
        self.full = recalling_caches(model, full, "recall")
        layers = attention_layers(model, self.full)
        quotas = policy.quotas(context, len(layers))
        self.small = list(self.full)
        everything = []
        for layer, quota in zip(layers, quotas):
            cache = layer.cache_in(self.full)
            cache.layer = layer
            held = cache.held()
            scores = mx.random.uniform(shape=held.keys.shape[:3])
            kept = held.taken(quota.select(scores))
            wanted = kept, scores, context, policy, quota
            layer.put(self.small, decode_cache(layer, *wanted, uniform=True, gathers=True))
            everything.append(Recollection(cache.sources(), layer))
            cache.growing_cache()
        mx.eval([c.state for c in self.small])
        self.verified = Verified(verify)
        self.gathering = Gathering(layers, everything, self.small, policy, self.verified)
        self.token = mx.zeros((1, 1), mx.int32)


def measure_verified(model, context: int, policy: Policy, steps: int) -> list[dict[str, Any]]:
    """One record a way: seconds and bytes of entries a token takes, after a prompt of `context` tokens.

    Votes fall, and drafts are right, as a draw of a given chance says, whatever the random entries make of them.
    """
    records = []
    with recording(attention_classes(model)):
        plain = _Answer(model, context, policy, "unsure")
        full_bytes = kv_bytes(plain.full)
        keys = full_bytes / 2
        small_bytes = kv_bytes(plain.small)

        def add(name: str, seconds: float, n_bytes: float, **rates: float) -> None:
            about = {"context": context, "contender": name, "kind": name, "steps": steps}
            figures = {"bytes_per_token": n_bytes, "tokens_per_second": 1 / seconds}
            records.append(about | rates | figures)

        add("full cache", _seconds(lambda: model(plain.token, cache=plain.full), steps), full_bytes)
        for rate in VOTES:
            rng = random.Random(0)
            step = _unsure_step(plain, rate, rng)
            read = small_bytes * (1 + rate) + rate * (keys + small_bytes)
            name = f"unsure, {rate:.0%} vote" if rate else "small cache"
            add(name, _seconds(step, steps), read, votes=rate)
        for right in RIGHT:
            answer = _Answer(model, context, policy, "all")
            seconds, verified = _checked_seconds(answer, right, steps)
            drafts, rounds = verified.drafted, verified.tokens - verified.accepted
            read = (rounds * full_bytes + drafts * small_bytes) / verified.tokens
            share = verified.accepted / verified.tokens
            add(f"all, {right:.0%} right", seconds, read, right=right, accepted=share)
            mx.clear_cache()
    return records


def _seconds(step: Step, steps: int) -> float:
    """The mean of so many steps, after a few to warm up."""
    for _ in range(WARM_UP):
        mx.eval(step())
    started = time.perf_counter()
    for _ in range(steps):
        mx.eval(step())
    return (time.perf_counter() - started) / steps


def _unsure_step(answer: _Answer, rate: float, rng: random.Random) -> Step:
    """A token of `verify="unsure"` that votes with a chance of `rate`."""

    def step() -> mx.array:
        if answer.gathering.is_due(answer.small):
            answer.gathering.gather(answer.small)
        logits = answer.model(answer.token, cache=answer.small)
        top_probability(logits).item()
        if rng.random() < rate:
            for layer in attention_layers(answer.model, answer.small):
                layer.cache_in(answer.small).rollback(1)
            answer.gathering.gather(answer.small)
            logits = answer.model(answer.token, cache=answer.small)
        return logits

    return step


def _checked_seconds(answer: _Answer, right: float, steps: int) -> tuple[float, Verified]:
    """Seconds a token of `verify="all"` takes whose drafts are right with a chance of `right`, each."""
    checked = Checked(answer.model, answer.full, answer.small, answer.gathering, answer.verified)
    rng = random.Random(0)
    seconds = []
    for _ in range(WARM_UP + steps):
        drafted = checked.next_draft
        goes_on = drafted is not None and rng.random() < right
        token = drafted if goes_on else (0 if drafted != 0 else 1)
        started = time.perf_counter()
        mx.eval(checked(mx.array([[token]]), answer.full))
        seconds.append(time.perf_counter() - started)
    checked.close()
    return statistics.fmean(seconds[WARM_UP:]), answer.verified
