"""Fidelity against an independent float64 computation from mlx-lm's own logits and our own loops."""

import random
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import assert_unpatched, plain

from mlx_snapkv import generate_step, prefill
from mlx_snapkv.demo.questions import make_haystack
from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.measure.divergence import divergence, log_softmax
from mlx_snapkv.measure.fidelity import (
    FIDELITY_SETTINGS,
    TEXT,
    run,
    summarise,
    tables,
    without_lookahead,
)
from mlx_snapkv.measure.methods import FULL_CACHE, KNOWN, LATER, Method
from mlx_snapkv.measure.records import Results
from mlx_snapkv.measure.texts import Piece, frame_of
from mlx_snapkv.models import attention_classes
from mlx_snapkv.models.patch import recording
from mlx_snapkv.planning.settings import resolve_compress

N = 24
BASE = "snapkv:budget=25%,n_sink=4,n_window=16,obs_window=8"
SNAPKV = f"{BASE},lookahead=4"
POLICIES = [
    f"{SNAPKV},on_full=slide",
    f"{BASE},lookahead=0",
    "snapkv:budget=25%,n_sink=4,n_window=16,obs_window=48,lookahead=4,on_full=slide",
    "keydiff:budget=25%,n_sink=4,block=32",
    f"tova:budget=60%,block=32 then {SNAPKV}",
]
QUESTIONS = ["Who was there?", "What is the text about?"]


METHODS = {FULL_CACHE: None} | {
    str(p): p for p in (resolve_compress(policy=text) for text in POLICIES)
}
NAMES = [*METHODS]


@pytest.fixture(scope="module")
def pieces(demo_llama):
    tokenizer, found = demo_llama[1], []
    for name, number in (("a", 1), ("a", 2), ("b", 1)):
        text, _ = make_haystack(tokenizer, random.Random(name), 3, 420)
        ids, end = tokenizer.encode(text, add_special_tokens=False), number * (150 + N + 1)
        found.append(Piece(name, number, ids[end - N - 151 : end - N - 1], ids[end - N - 1 : end]))
    return found


@pytest.fixture(scope="module")
def records(demo_llama, pieces):
    methods = [*map(Method, METHODS.values())]
    return run(*demo_llama, pieces, methods, FIDELITY_SETTINGS, QUESTIONS, N, Results({}))


def record_of(records, name, setting, piece):
    wanted = {"method": name, "setting": setting, "document": piece[0], "piece": piece[1]}
    return next(r for r in records if r | wanted == r)


def softmax64(logits):
    """Return log-probabilities in float64."""
    logits = np.array(logits.astype(mx.float32), np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def full_logprobs(model, prompt, known):
    """Return log-probabilities after the prompt and after all known tokens but the last, from one model call."""
    logits = model(mx.array([*prompt, *known[:-1]])[None], cache=make_prompt_cache(model))[0]
    return softmax64(logits[len(prompt) - 1 :])


def fed_one_by_one(model, document, policy, tokens):
    """Return log-probabilities after each token that follows a compressed document."""
    cache, _ = prefill(model, document, without_lookahead(policy))
    with recording(attention_classes(model)):
        return softmax64(mx.concatenate([model(mx.array([[t]]), cache=cache)[0] for t in tokens]))


def expected(model, tokenizer, piece, question, setting, policy):
    """Return the log-probabilities of the full cache and of the policy, token by token."""
    frame = frame_of(tokenizer, None if setting == TEXT else question)
    document = [*frame.before, *piece.tokens]
    if setting == TEXT:
        full = full_logprobs(model, document, piece.following)[1:]
        return full, fed_one_by_one(model, document, policy, piece.following[:-1])
    prompt = [*document, *frame.after]
    answer = [token for token, _ in plain(model, mx.array(prompt), N)]
    stops = [i for i, token in enumerate(answer) if token in tokenizer.eos_token_ids]
    answer = answer[: stops[0] + 1] if stops else answer
    full = full_logprobs(model, prompt, answer)
    if setting == LATER:
        rest = [*frame.after, *answer[:-1]]
        return full, fed_one_by_one(model, document, policy, rest)[-len(answer) :]
    told = iter(answer)
    given = {"policy": policy, "max_tokens": len(answer)}
    given["sampler"] = lambda logprobs: mx.array([next(told, 0)])
    steps = generate_step(mx.array(prompt), model, **given)
    return full, softmax64(mx.stack([logprobs for _, logprobs in steps]))


@pytest.mark.parametrize("setting", FIDELITY_SETTINGS)
@pytest.mark.parametrize("name", NAMES[1:])
def test_figures_equal_the_float64_computation(demo_llama, pieces, records, setting, name):
    for piece, question in zip(pieces[:2], QUESTIONS):
        whole, record = (record_of(records, n, setting, piece) for n in (FULL_CACHE, name))
        full, ours = expected(*demo_llama, piece, question, setting, METHODS[name])
        assert record["tokens"] == len(full) == len(ours)
        full, ours = (each[-record["judged"] :] for each in (full, ours))
        kl = (np.exp(full) * (full - ours)).sum(axis=-1)
        assert record["kl"] == pytest.approx(kl.mean(), abs=2e-5, rel=1e-3)
        assert record["same"] == pytest.approx((full.argmax(-1) == ours.argmax(-1)).mean())
        assert record["question"] == (None if setting == TEXT else question)
        assert record["reason"] is None and record["entries"] < 150
        if setting == TEXT:
            for own, logprobs in ((record, ours), (whole, full)):
                came = -logprobs[np.arange(N), piece.following[1:]].mean()
                assert own["loss"] == pytest.approx(came, rel=1e-4)
        assert (whole["kl"], whole["same"], whole["reason"]) == (0, 1, None)
        assert whole["entries"] >= 150
    assert_unpatched()


def test_figures_begin_after_the_compression(records, pieces):
    """Tokens count from the first that the compressed cache predicts: after the lookahead and one more token."""
    for piece in pieces:
        known = [record_of(records, name, KNOWN, piece) for name in NAMES[1:]]
        n = known[0]["tokens"]
        assert [r["judged"] for r in known] == [max(0, n - x) for x in (5, 2, 5, 2, 5)]
        later = record_of(records, NAMES[1], LATER, piece)
        assert later["judged"] == later["tokens"] == n


@pytest.mark.parametrize("before", ["", "keydiff:budget=60%,block=32 then "])
def test_an_answer_that_ends_before_the_compression_is_not_judged(demo_llama, pieces, before):
    """This applies whether or not the policy shares the prefill. The figures of other policies are unchanged."""
    names = [f"{before}{BASE},lookahead={n}" for n in (0, 200)]
    methods = [Method(policy and resolve_compress(policy=policy)) for policy in (None, *names)]
    records = run(*demo_llama, pieces[:2], methods, [KNOWN], QUESTIONS, N, Results({}))
    full, none, ahead = summarise(records)
    assert none["judged"] == full["tokens"] - 2 * 2 and none["unjudged"] == 0 < none["kl"]["mean"]
    assert (ahead["judged"], ahead["unjudged"]) == (0, 2)
    assert (ahead["kl"], ahead["same"], ahead["kl_against_first"]) == (None, None, None)
    (table,) = tables([full, none, ahead])
    assert table.rows[2][1:5] == ["not scored", "", "", "0"]
    told = f"2 of 2 answers are not scored: they ended before {methods[2].name} had compressed their prompt."
    assert told in table.remark


def test_policies_that_are_judged_from_different_tokens_are_not_paired(records):
    found = {(s["setting"], s["method"]): s for s in summarise(records)}
    others = {name: found[KNOWN, name]["kl_against_first"] is None for name in NAMES[1:]}
    assert [*others.values()] == [False, True, False, True, False]
    _, known, _ = tables([*found.values()])
    assert [row[2] == "other tokens" for row in known.rows[1:]] == [*others.values()]
    assert all(found[LATER, name]["kl_against_first"] is not None for name in NAMES[1:])


def test_the_summary_is_paired_by_piece_and_has_a_table_for_each_setting(records):
    summary = summarise(records)
    assert [(s["setting"], s["method"]) for s in summary] == [
        (setting, name) for setting in FIDELITY_SETTINGS for name in METHODS
    ]
    first, own = (
        [r for r in records if (r["setting"], r["method"]) == (TEXT, n)] for n in NAMES[1:3]
    )
    found = summary[2]
    assert (found["pieces"], found["texts"], found["tokens"]) == (3, 2, 3 * N)
    assert found["kl"]["mean"] == pytest.approx(np.mean([r["kl"] for r in own]))
    gap = np.mean([a["kl"] - b["kl"] for a, b in zip(own, first)])
    assert found["kl_against_first"]["mean"] == pytest.approx(gap)
    assert found["kl"]["low"] <= found["kl"]["mean"] <= found["kl"]["high"]
    assert summary[0]["loss"] + found["loss_against_full"]["mean"] == pytest.approx(found["loss"])
    text, known, later = tables(summary)
    assert text.columns[4] == "loss" and known.columns[4] == "tokens scored"
    assert [row[0] for row in later.rows] == NAMES and later.rows[0][1] == "0"
    many = [r | {"document": f"{i} {r['document']}"} for i in range(3) for r in records]
    of_six_texts, *_ = tables(summarise(many))
    assert " to " in of_six_texts.rows[1][1] and "to" not in text.rows[1][1]  # two have no interval
    ended_early = [r | {"judged": r["judged"] * r["document"].startswith("0")} for r in many]
    of_two_scored_texts, *_ = tables(summarise(ended_early))
    assert "to" not in of_two_scored_texts.rows[1][1]


def test_tokens_of_zero_probability_add_nothing_to_the_divergence():
    full, other = (log_softmax(mx.array([[x, 1.0, -mx.inf]])) for x in (0.0, 3.0))
    assert divergence(full, full).tolist() == [0.0]
    p, q = (np.exp([x, 1.0]) / np.exp([x, 1.0]).sum() for x in (0.0, 3.0))
    assert divergence(full, other).item() == pytest.approx((p * np.log(p / q)).sum(), abs=1e-6)


def test_the_frame_around_a_text_is_the_chat_templates(demo_llama):
    """Without a template, the question is surrounded only by line breaks."""
    tokenizer = demo_llama[1]
    frame = frame_of(tokenizer, "Who?")
    text = tokenizer.encode("It was cold.", add_special_tokens=False)
    messages = [{"role": "user", "content": "It was cold.\n\nWho?"}]
    given = {"add_generation_prompt": True, "enable_thinking": False}
    whole = tokenizer.apply_chat_template(messages, **given)
    assert tokenizer.decode([*frame.before, *text, *frame.after]) == tokenizer.decode(whole)
    assert frame_of(tokenizer, None).after == []
    tokenizer = SimpleNamespace(
        has_chat_template=False,
        encode=lambda text, add_special_tokens=True: [1] * add_special_tokens + [*map(ord, text)],
        apply_chat_template=lambda *args, **kwargs: "always the same",
    )
    assert frame_of(tokenizer, "W?") == ([1], [1], [10, 10, 87, 63, 10])
    tokenizer.has_chat_template = True
    with pytest.raises(SnapKVError, match="the chat template changes what the user says"):
        frame_of(tokenizer, "W?")
