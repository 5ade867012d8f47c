"""What becomes of an answer's own rows when it is longer than the recent window."""

import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import assert_same, assert_unpatched, in_order, plain, steps

from mlx_snapkv import (
    BlockKVCache,
    SnapKV,
    SnapKVCache,
    SnapKVError,
    generate_step,
    patch_for_snapkv,
    prefill,
    unpatch_snapkv,
)
from mlx_snapkv.chat.prompts import common_prefix
from mlx_snapkv.demo.documents import fact_sentence, filler_sentence, make_facts
from mlx_snapkv.demo.questions import is_right, make_haystack, token_counter

SMALL = {"budget": 56, "n_sink": 4, "n_window": 32, "obs_window": 8, "lookahead": 0}


def kept(cache):
    return [c for c in cache if isinstance(c, (SnapKVCache, BlockKVCache))]


def answer(model, tokens, n, on_full, **changes):
    cache, reports = make_prompt_cache(model), []
    policy = SnapKV(**SMALL | changes, on_full=on_full)
    items = steps(model, tokens, n, policy=policy, prompt_cache=cache, on_report=reports.append)
    assert_unpatched()
    return items, kept(cache), reports[0]


def test_grow_keeps_every_generated_row(tiny_model, tokens):
    _, caches, report = answer(tiny_model, tokens, 150, "grow")
    assert report.entries == 56
    for cache in caches:
        assert cache.size() == 56 + 150  # what the policy keeps is the prompt's
        assert cache.positions[0, 0, -150:].tolist() == list(range(200, 350))


def test_grow_is_slide_with_a_window_that_never_fills(tiny_model, tokens):
    wide, _, _ = answer(tiny_model, tokens, 60, "grow", budget=140, n_window=100)
    slid, _, _ = answer(tiny_model, tokens, 60, "slide", budget=140, n_window=100)
    assert [t for t, _ in wide[:2]] == [t for t, _ in slid[:2]]
    grown = answer(tiny_model, tokens, 60, "grow", budget=140, n_window=32)[0]
    assert len(grown) == 60


@pytest.mark.parametrize("on_full", ["reselect", "keydiff"])
def test_choosing_again_keeps_one_shape_and_the_budget(tiny_model, tokens, on_full, monkeypatch):
    shapes = set()
    original = SnapKVCache.update_and_fetch

    def watched(self, keys, values):
        out = original(self, keys, values)
        shapes.update(x.shape for x in out)
        return out

    monkeypatch.setattr(SnapKVCache, "update_and_fetch", watched)
    _, caches, report = answer(tiny_model, tokens, 200, on_full)
    assert report.entries == 56 and report.reason is None
    assert {shape[2] for shape in shapes} == {56}
    for cache in caches:
        positions = set(cache.positions[0, 0].tolist())
        assert len(positions) == 56, "no row is held twice"
        assert {0, 1, 2, 3, *range(400 - 16, 400)} <= positions


def test_reselect_lets_the_last_queries_choose(tokens, tiny_model):
    """Some rows of the prompt and some of the early answer survive, not just the newest."""
    _, caches, _ = answer(tiny_model, tokens, 150, "reselect", pool_kernel=1)
    positions = set(caches[0].positions[0, 0].tolist())
    assert any(4 <= p < 334 for p in positions - set(range(334, 350)))


@pytest.mark.parametrize("on_full", ["reselect", "keydiff"])
def test_until_the_first_choice_every_way_slides(tiny_model, tokens, on_full):
    """After 16 answer tokens, half of the window, there is a choice."""
    slid, chose = (answer(tiny_model, tokens, 40, way)[0] for way in ("slide", on_full))
    n = 16 + 1
    assert_same(slid[:n], chose[:n])
    assert not all(mx.array_equal(a, b) for (_, a), (_, b) in zip(slid[n:], chose[n:]))


def test_grow_is_the_default(tiny_model, tokens):
    assert SnapKV().on_full == "grow"
    default = steps(tiny_model, tokens, 40, policy=SnapKV(**SMALL))
    assert_same(answer(tiny_model, tokens, 40, "grow")[0], default)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"on_full": "forget"}, "on_full must be grow, slide, reselect, keydiff, got 'forget'"),
        ({"reserve": -1}, 'reserve must be a whole number or a share such as "10%", got -1'),
        ({"reserve": "120%"}, "reserve must be .*, got '120%'"),
        ({"reserve": "half"}, "reserve must be .*, got 'half'"),
        ({"reserve": 0.5}, "reserve must be .*, got 0.5"),
        ({"reserve": True}, "reserve must be .*, got True"),
        ({"on_full": "slide", "schedule": "block"}, "schedule must be once with on_full=slide"),
    ],
)
def test_a_mistake_is_one_sentence(options, words):
    with pytest.raises(SnapKVError, match=words):
        SnapKV(**options)


def held(cache):
    """By KV head, the positions of the entries."""
    return [set(head) for head in cache.positions[0].tolist()]


@pytest.mark.parametrize("reserve, n", [(0, 0), ("5%", 1), (7, 7), ("50%", 10), (99, 20)])
def test_the_best_voted_entries_are_reserved(tiny_model, tokens, reserve, n):
    """As many as asked for, those that a smaller budget would have kept, however long the answer."""
    fewer = SMALL["budget"] - 20 + n
    cut = answer(tiny_model, tokens, 1, "slide", budget=fewer)[1]
    _, caches, _ = answer(tiny_model, tokens, 150, "keydiff", reserve=reserve)
    for cache, small in zip(caches, cut):
        voted = small._pinned_positions[0].tolist()
        assert all(set(best) <= kept for best, kept in zip(voted, held(cache)))
        assert cache.size() == 56
        assert cache._reserved.sum(axis=-1).tolist() == [[SMALL["n_sink"] + n] * len(voted)]


def test_positions_and_rows_agree_after_many_selections(tokens, tiny_model):
    _, caches, _ = answer(tiny_model, tokens, 300, "reselect")
    for cache in caches:
        keys, _, positions = in_order(cache)
        assert positions.shape[2] == keys.shape[2] == cache.size() == 56
        assert mx.all(positions[..., 1:] > positions[..., :-1]).item()


def finds_what_it_said(model, tokenizer, on_full):
    """Whether a fact that an answer begins with is found 256 tokens later. The model is made to say all of it."""
    rng, count = random.Random(1), token_counter(tokenizer)
    document, (known, *_) = make_haystack(tokenizer, rng, 4, 1024)
    (fact,) = make_facts(rng, 1)
    said = fact_sentence(fact, rng)
    while count(said) < 256:
        said += " " + filler_sentence(rng)
    turns = [f"{document}\n\n{known.question}", said, fact.question]
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns)]
    prompt, whole = (
        tokenizer.apply_chat_template(m, add_generation_prompt=True)
        for m in (messages[:1], messages)
    )
    told = whole[common_prefix([prompt, whole]) :]
    left, cache = told[:8], make_prompt_cache(model)
    policy = SnapKV(budget=256, n_sink=4, n_window=128, lookahead=4, on_full=on_full)
    for _ in generate_step(
        mx.array(prompt),
        model,
        max_tokens=8,
        prompt_cache=cache,
        policy=policy,
        sampler=lambda logprobs: mx.array([left.pop(0)]) if left else mx.argmax(logprobs, axis=-1),
    ):
        pass
    rest = generate_step(mx.array(told[8:]), model, max_tokens=12, prompt_cache=cache)
    return is_right(fact, tokenizer.decode([token for token, _ in rest]))


def test_what_an_answer_said_is_found_again_if_its_keys_are_kept(demo_model):
    """The queries that will ask for it don't exist yet when rows are chosen, so votes can't know."""
    found = {
        on_full: finds_what_it_said(*demo_model, on_full)
        for on_full in ("slide", "grow", "keydiff")
    }
    assert found == {"slide": False, "grow": True, "keydiff": True}


@pytest.mark.parametrize("on_full", ["reselect", "keydiff"])
def test_a_follow_up_is_read_in_blocks_with_a_choice_between_them(
    tiny_model, tokens, on_full, monkeypatch
):
    cache = make_prompt_cache(tiny_model)
    steps(tiny_model, tokens, 2, policy=SnapKV(**SMALL, on_full=on_full), prompt_cache=cache)
    fed, choices = [], []
    update, evict = SnapKVCache.update_and_fetch, SnapKVCache.evict

    def watched(self, keys, values):
        fed.append(keys.shape[2])
        return update(self, keys, values)

    monkeypatch.setattr(SnapKVCache, "update_and_fetch", watched)
    monkeypatch.setattr(SnapKVCache, "evict", lambda self: choices.append(self) or evict(self))
    steps(tiny_model, tokens[:130], 4, prompt_cache=cache)
    assert max(fed) == 16 and len(choices) == 8 * len(kept(cache))
    assert all(c.size() == 56 for c in kept(cache))
    assert_unpatched()


def test_votes_that_nobody_recorded_are_told(tokens, tiny_model):
    policy = SnapKV(**SMALL, on_full="reselect")
    cache, _ = prefill(tiny_model, tokens[:-1], policy)
    with pytest.raises(SnapKVError, match="were not recorded: use mlx_snapkv's generate_step, or"):
        plain(tiny_model, tokens[-1:], 60, prompt_cache=cache)
    cache, _ = prefill(tiny_model, tokens[:-1], policy)
    patch_for_snapkv(tiny_model)
    try:
        assert len(plain(tiny_model, tokens[-1:], 60, prompt_cache=cache)) == 60
    finally:
        unpatch_snapkv(tiny_model)


def test_a_cache_that_grows_patches_nothing(tokens, tiny_model):
    cache, _ = prefill(tiny_model, tokens, SnapKV(**SMALL, on_full="grow"))
    for _ in generate_step(tokens[:5], tiny_model, max_tokens=3, prompt_cache=cache):
        assert_unpatched()
    assert all(c.n_queries == 0 for c in kept(cache))
