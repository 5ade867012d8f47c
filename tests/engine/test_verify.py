"""Answers that read on in all entries: what they refuse, and what they leave alone."""

import os

import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import assert_same, assert_unpatched, plain, steps
from tiny_models import make_llama

from mlx_snapkv import Conversation, SnapKVError, prefill, stream_generate
from mlx_snapkv.caches.layers import attention_layers

POLICY = "snapkv:top_k=20,n_sink=4,n_window=16,obs_window=8,lookahead=0"
RECALLING = ["recall", "recall:8bit", "recall:4bit", "recall:file"]
WRONG = [
    ({"verify": "all"}, "verify=all asks entries that memory=drop does not keep"),
    ({"verify": "some", "memory": "recall"}, "verify must be all, got 'some'"),
    ({"refresh": "never", "memory": "recall"}, "refresh must be token or turn, got 'never'"),
    ({"memory": "remember"}, "memory must be drop, recall"),
    ({"verify": "all", "memory": "recall:file"}, "must be in memory, not memory=recall:file"),
    ({"policy": "h2o:budget=64", "memory": "recall"}, "h2o:budget=64 counts the attention of all"),
]


@pytest.fixture
def wide():
    """A random model whose heads can be quantised."""
    return make_llama(head_dim=32)


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_what_can_not_be_served_is_refused_at_the_call(wide, tokens, options, message):
    with pytest.raises(SnapKVError, match=message):
        steps(wide, tokens, **{"policy": POLICY} | options)


def test_linear_layers_can_not_check_drafts(demo_qwen, tokens):
    model, _ = demo_qwen
    with pytest.raises(SnapKVError, match="verify=all takes tokens back, and 2 of 4 layers can't"):
        steps(model, tokens, policy=POLICY, memory="recall", verify="all")


@pytest.mark.parametrize("memory", RECALLING)
def test_below_the_gate_nothing_is_different(wide, tokens, memory):
    wanted = plain(wide, tokens)
    found = steps(wide, tokens, policy=f"{POLICY},min_ctx=500".replace("", ""))
    assert_same(found, wanted)
    keywords = {"policy": "snapkv:top_k=300", "memory": memory}
    assert_same(steps(wide, tokens, **keywords), wanted)
    assert_unpatched()


@pytest.mark.parametrize("memory", RECALLING)
def test_recall_alone_keeps_what_drop_keeps(wide, tokens, memory):
    wanted = steps(wide, tokens, policy=POLICY)
    assert_same(steps(wide, tokens, policy=POLICY, memory=memory, refresh="turn"), wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "recall", "refresh": "turn"},
        {"memory": "recall"},
        {"memory": "recall", "verify": "all"},
        {"memory": "recall:file"},
    ],
)
def test_a_prompt_cache_holds_the_whole_prompt_and_goes_on(wide, tokens, options):
    """The next request votes over all entries: it keeps what one request for the whole prompt would."""
    keywords = {"policy": POLICY} | options
    reports, cache = [], make_prompt_cache(wide)
    steps(wide, tokens[:150], 6, prompt_cache=cache, **keywords)
    # The first token of the answer was fed before the compression.
    assert {c.offset for c in cache} == {151}
    for c in cache:
        c.trim(1)
    found = steps(wide, tokens[150:], prompt_cache=cache, on_report=reports.append, **keywords)
    assert reports[0].compressed and reports[0].prompt_tokens == 200
    wanted = steps(wide, tokens, **keywords)
    assert [t for t, _ in found] == [t for t, _ in wanted]
    assert_unpatched()


@pytest.mark.parametrize("memory", RECALLING)
@pytest.mark.parametrize("refresh", ["turn", "token"])
def test_a_question_of_a_single_token_votes_by_itself(wide, tokens, memory, refresh):
    """Also with last_token=false, which leaves nobody else to vote."""
    answers = []
    for last_token in ("false", "true"):
        cache = make_prompt_cache(wide)
        plain(wide, tokens[:-1], 0, prompt_cache=cache)
        options = {"memory": memory, "refresh": refresh, "prompt_cache": cache}
        policy = f"{POLICY},last_token={last_token}"
        answers.append(steps(wide, tokens[-1:], policy=policy, **options))
    assert_same(*answers)


@pytest.mark.parametrize("memory", RECALLING)
def test_a_compressed_prompt_cache_has_nothing_to_recall(wide, tokens, memory):
    cache, _ = prefill(wide, tokens, POLICY)
    with pytest.raises(SnapKVError, match="needs a prompt cache with all entries"):
        steps(wide, tokens, policy=POLICY, memory=memory, prompt_cache=cache)


@pytest.mark.parametrize("verify", [None, "all"])
def test_whoever_stops_reading_leaves_the_conversation_as_it_should_be(demo_llama, ask, verify):
    model, tokenizer = demo_llama
    tokens, fact = ask(tokenizer, 600, seed=1)
    text = tokenizer.decode(tokens)
    told = {"policy": POLICY, "memory": "recall", "max_tokens": 12}
    answers = []
    for stop in (3, None):
        conversation = Conversation(model, tokenizer, verify=verify, **told)
        for n, _ in enumerate(conversation.send(text), start=1):
            if n == stop:
                break
        held = {c.offset for c in conversation.prompt_cache}
        assert len(held) == 1 and held == {len(conversation.read)}
        answers.append("".join(r.text for r in conversation.send(fact.question)))
    assert fact.value in answers[0] and fact.value in answers[1]
    assert_unpatched()


def test_a_failing_vote_leaves_the_conversation_as_it_was_read(demo_llama, ask):
    """The store's file is cut short while an answer is under way: one sentence, and the turn's prompt is read."""
    model, tokenizer = demo_llama
    tokens, _ = ask(tokenizer, 600, seed=1)
    options = {"memory": "recall:file"}
    conversation = Conversation(model, tokenizer, policy=POLICY, max_tokens=12, **options)
    answer = conversation.send(tokenizer.decode(tokens))
    next(answer)
    layer = attention_layers(model, conversation.prompt_cache)[-1]
    keys, _ = layer.cache_in(conversation.prompt_cache).store._sources[-1].files
    os.ftruncate(keys._file.fileno(), 100)
    with pytest.raises(SnapKVError, match="entries kept in a file can't be read"):
        list(answer)
    assert_unpatched()
    assert conversation.messages[-1]["role"] == "assistant"


def test_what_a_token_reads_stays_small(demo_llama, ask):
    model, tokenizer = demo_llama
    tokens, _ = ask(tokenizer, 1500, seed=1)
    reports = []
    keywords = {"policy": POLICY, "memory": "recall"}
    for _ in stream_generate(model, tokenizer, tokens, 60, on_report=reports.append, **keywords):
        pass
    of_one = reports[0].kv_bytes_before / len(tokens)
    assert reports[0].kv_bytes_after <= 40 * of_one
    assert reports[0].to_dict()["refreshed"] == reports[0].refreshed <= 40
