"""Which tokens of a sparse answer read all entries, depending on token times: simulated and in real requests."""

import itertools
import math
import random
import time

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import forced, plain, steps
from tiny_models import make_llama, make_qwen

from mlx_snapkv import Conversation, stream_generate
from mlx_snapkv.caches.layers import attention_layers, n_tokens
from mlx_snapkv.demo.questions import make_haystack
from mlx_snapkv.engine import pace, serving
from mlx_snapkv.engine.pace import FIRST_GAP, N_MEASURED, N_SKIPPED, RETRY_GROWTH, RETRY_RATIO, Pace
from mlx_snapkv.engine.request import Request
from mlx_snapkv.sparse import cache as cache_module
from mlx_snapkv.sparse.options import FIRST_TOKENS

TRIAL = N_SKIPPED + N_MEASURED


def switches(seconds, n_tokens, n_prompt=10_000, tokens_to_repay_setup=0):
    """Return the tokens after which a pace switches, if each token takes `seconds(n, reads_all)`."""
    measured, found = Pace(n_prompt, tokens_to_repay_setup), []
    for n in range(1, n_tokens + 1):
        if measured.switches_after(seconds(n, measured.reads_all)):
            found.append(n)
    return found


def test_the_faster_way_continues():
    far_slower = switches(lambda n, reads_all: 1.0 if reads_all else 2.0, 4000)
    assert far_slower == [FIRST_TOKENS, FIRST_TOKENS + TRIAL]
    assert switches(lambda n, reads_all: 2.0 if reads_all else 1.0, 4000) == [FIRST_TOKENS]


@pytest.mark.parametrize(
    "tokens_to_repay_setup, first", [(3.5, FIRST_TOKENS), (100.5, 100), (math.inf, 5000)]
)
def test_few_entries_are_tried_once_the_answer_is_as_long_as_repays_the_index(
    tokens_to_repay_setup, first
):
    """If the record predicts no gain, the other way is tried only after the text has grown by half."""
    found = switches(
        lambda n, reads_all: 2.0 if reads_all else 1.0, 6000, 10_000, tokens_to_repay_setup
    )
    assert found[0] == first


@pytest.mark.parametrize("few, wins", [(0.98, False), (0.96, True)])
def test_a_sparse_token_must_be_a_little_faster(few, wins):
    found = switches(lambda n, reads_all: 1.0 if reads_all else few, FIRST_TOKENS + TRIAL)
    assert (len(found) == 1) == wins


def test_the_first_tokens_after_a_switch_do_not_count():
    """They allocate buffers. A single slow token among the measured ones does not count either."""
    since = itertools.count()

    def seconds(n, reads_all):
        if reads_all:
            return 1.0
        k = next(since)
        return 50.0 if k < N_SKIPPED or k == N_SKIPPED + 2 else 0.5

    assert switches(seconds, 1000) == [FIRST_TOKENS]


def test_a_way_that_is_not_much_slower_is_tried_again_less_and_less_often():
    found = switches(lambda n, reads_all: 1.0 if reads_all else 1.1, 2000, n_prompt=100_000)
    tries = found[::2]
    compared = [FIRST_TOKENS + TRIAL]
    for k in range(2):
        compared.append(compared[-1] + FIRST_GAP * 2**k + TRIAL)
    assert tries == [FIRST_TOKENS, *(n - TRIAL for n in compared[1:]), tries[-1]]
    assert all(b - a == TRIAL for a, b in zip(found[::2], found[1::2]))


def test_the_winner_may_change_as_the_text_grows():
    """Even a much slower way is tried again once the text has grown by half."""
    n_prompt = 1000

    def seconds(n, reads_all):
        return (n_prompt + n) / 1000 if reads_all else 1.4

    found = switches(seconds, 3000, n_prompt)
    assert found[:2] == [FIRST_TOKENS, FIRST_TOKENS + TRIAL]
    third = found[2]
    assert abs(third - (RETRY_GROWTH - 1) * n_prompt - FIRST_TOKENS) < 3 * TRIAL
    assert RETRY_RATIO * (n_prompt + FIRST_TOKENS) / 1000 < 1.4  # so the growth caused the trial


# Requests with an invented clock.

BUDGET = "budget=60,n_sink=4,n_window=16,read=dense"
NEARLY_ALL = "budget=199,n_sink=4,n_window=4,read=dense"
N = 200


@pytest.fixture
def clock(monkeypatch):
    """Return a function that sets a clock by which each token takes `seconds(reads_all)`."""

    def make(seconds):
        paces = []
        monkeypatch.setattr(serving, "Pace", lambda *args: paces.append(Pace(*args)) or paces[-1])
        timed = serving._TimedItems.__next__

        def told(self):
            item = timed(self)
            self.latest_seconds = seconds(paces[-1].reads_all)
            return item

        monkeypatch.setattr(serving._TimedItems, "__next__", told)

    return make


def sparse(reads_all):
    return 2.0 if reads_all else 1.0


def dense(reads_all):
    return 1.0 if reads_all else 2.0


def assert_equal(found, wanted):
    """Assert that tokens are equal and log-probabilities nearly so, as other chunks round sums differently."""
    assert [token for token, _ in found] == [token for token, _ in wanted]
    assert all(mx.allclose(a, b, atol=1e-4) for (_, a), (_, b) in zip(found, wanted))


@pytest.mark.parametrize("make", [make_llama, make_qwen])
def test_a_short_answer_equals_the_full_caches(make, tokens):
    """A short answer needs no index. The cache contains the answer as well."""
    model, reports, cache = make(), [], make_prompt_cache(make())
    options = {"sparse": BUDGET, "on_report": reports.append, "prompt_cache": cache}
    found = steps(model, tokens, FIRST_TOKENS - 1, **options)
    assert_equal(found, plain(model, tokens, FIRST_TOKENS - 1))
    (report,) = reports
    assert report.read_all == [[1, None]] and report.read_per_token is None
    assert not report.compressed and "ended among its first tokens" in report.reason
    layers = attention_layers(model, cache)
    assert {layer.cache_in(cache).offset for layer in layers} == {N + FIRST_TOKENS - 1}
    assert not any(layer.layer_cache_in(cache).is_compressed for layer in layers)


@pytest.mark.parametrize("make", [make_llama, make_qwen])
def test_an_answer_continues_sparsely_if_that_is_faster(make, tokens, clock):
    clock(sparse)
    model, reports = make(), []
    found = steps(model, tokens, 60, sparse=BUDGET, on_report=reports.append)
    full = plain(model, tokens, 60)
    n = FIRST_TOKENS + 1
    assert_equal(found[:n], full[:n])
    assert not mx.array_equal(found[n][1], full[n][1])
    assert reports[0].read_all == [[1, n]] and reports[0].read_per_token == 60
    assert f"read by every token but 1 to {n}" in str(reports[0]) and not reports[0].warnings


@pytest.mark.parametrize(("make", "tries"), [(make_llama, 3), (make_qwen, 1)])
def test_an_answer_continues_with_all_entries_if_that_is_faster(
    make, tries, tokens, clock, monkeypatch
):
    """Tokens that read all entries are close to the full cache's, even though earlier tokens chose their entries."""
    clock(dense)
    if tries > 1:  # older tokens of the answer can be chosen, too
        monkeypatch.setattr(cache_module, "MAX_RECENT", 8)
        monkeypatch.setattr(pace, "FIRST_GAP", 8)
        monkeypatch.setattr(pace, "RETRY_RATIO", 3)
    model, reports = make(), []
    full = plain(model, tokens, 80)
    options = {"sampler": forced(token for token, _ in full), "on_report": reports.append}
    found = steps(model, tokens, 80, sparse=NEARLY_ALL, **options)
    away = np.array([float(mx.abs(a - b).max()) for (_, a), (_, b) in zip(found, full)])
    (report,) = reports
    in_full = np.zeros(len(away), bool)
    for first, last in report.read_all:
        in_full[first - 1 : last] = True
    assert away[in_full].max() < 0.05 and away[~in_full].min() > 0.005
    assert report.read_all[0] == [1, FIRST_TOKENS + 1] and report.read_all[-1][1] is None
    assert len(report.read_all) == tries + 1
    assert "went on with all entries" in report.warnings[0]


def test_the_speed_of_an_answer_leaves_out_the_switch(demo_llama, monkeypatch):
    """The token just before the switch may be the answer's last. Its speed is not negative."""
    compress = Request.compress

    def slow_compress(self):
        time.sleep(1)
        return compress(self)

    monkeypatch.setattr(Request, "compress", slow_compress)
    model, tokenizer = demo_llama
    text, _ = make_haystack(tokenizer, random.Random(4), 2, 600)
    options = {"sparse": "budget=200,n_window=32", "max_tokens": FIRST_TOKENS + 2}
    responses = list(stream_generate(model, tokenizer, text, **options))
    seconds = [response.generation_tokens / response.generation_tps for response in responses]
    assert seconds[0] > 0 and seconds == sorted(seconds) and seconds[-1] < 1


@pytest.mark.parametrize("times", [sparse, dense])
def test_turns_continue_from_the_tokens_that_were_read(times, demo_model, clock):
    """The cache contains the tokens up to the last switch, and a hybrid's linear states match these tokens."""
    clock(times)
    model, tokenizer = demo_model
    text, facts = make_haystack(tokenizer, random.Random(4), 2, 600)
    options = {"sparse": "budget=200,n_window=32", "max_tokens": 40}
    talk = Conversation(model, tokenizer, **options)
    talk.attach(text)
    for fact in facts:
        assert fact.value in "".join(x.text for x in talk.send(fact.question))
        assert len(talk.read) == n_tokens(talk.prompt_cache)
