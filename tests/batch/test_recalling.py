"""Requests of a batch that forget nothing answer as they do alone, and leave what follow-ups go on from."""

import copy

import mlx.core as mx
import pytest
from batch_helpers import Run, alone, prompts_of
from mlx_lm.models.cache import make_prompt_cache
from model_configs import make_model
from request_helpers import assert_unpatched
from tiny_models import make_llama, make_qwen

from mlx_snapkv import SnapKVError
from mlx_snapkv.batch.generator import CompressedBatchGenerator
from mlx_snapkv.caches import full_view
from mlx_snapkv.caches.layers import members

PLAIN = "snapkv:n_sink=4,n_window=32,obs_window=32,min_ctx=100,budget=56"
SNAPKV = f"{PLAIN},lookahead=4"
BOOK = "keydiff:budget=64,block=32,min_ctx=100 then snapkv:n_sink=4,obs_window=8,n_window=16,budget=48,lookahead=0"
WAYS = [
    (SNAPKV, {"memory": "recall"}),
    (SNAPKV, {"memory": "recall:file:8bit"}),
    (f"{PLAIN},lookahead=0", {"memory": "recall:4bit", "verify": "all"}),
    (BOOK, {"memory": "recall:file"}),
]
LENGTHS = (190, 40, 260, 120)


@pytest.fixture(scope="module")
def model():
    return make_llama(hidden_size=128)


def of(value):
    return ",".join(map(str, value.values())) if isinstance(value, dict) else value[:6]


@pytest.mark.parametrize(("policy", "options"), WAYS, ids=of)
def test_staggered_requests_answer_as_alone(model, policy, options):
    prompts = prompts_of(*LENGTHS)
    limits = [12, 60, 40, 25]
    recalled = {}
    run = Run(model, policy, on_recall=lambda uid, *told: recalled.update({uid: told}), **options)
    for uid, prompt, limit in zip(run.staggered(prompts, limits), prompts, limits):
        reports = []
        wanted = alone(model, prompt, limit, policy=policy, on_report=reports.append, **options)
        assert run.answers[uid] == wanted
        assert run.reports[uid].entries_kept == reports[0].entries_kept
        assert run.reports[uid].reason == reports[0].reason
        assert (uid in recalled) == (len(prompt) >= 100)
        if uid in recalled:
            tokens = (prompt + wanted)[: len(recalled[uid][1])]
            assert recalled[uid][1] == tokens and len(tokens) >= len(prompt)
    assert_unpatched()


@pytest.mark.parametrize(("policy", "options"), WAYS, ids=of)
def test_several_go_on_from_what_one_has_read(model, policy, options):
    """As from a prompt cache of their own: none sees what another was asked."""
    (document,) = prompts_of(200)
    recalled = {}
    run = Run(
        model,
        policy,
        turns=True,
        on_recall=lambda uid, *told: recalled.update({uid: told}),
        **options,
    )
    (first,) = run.insert([document], 8)
    run.finish()
    caches, tokens = recalled[first]
    questions = prompts_of(12, 30, 60, seed=1)
    given = [copy.deepcopy(caches) for _ in questions]
    uids = run.insert(questions, 20, caches=given, all_tokens=[list(tokens) for _ in questions])
    run.finish()
    for uid, question in zip(uids, questions):
        own = copy.deepcopy(caches)
        wanted = alone(model, question, 20, policy=policy, prompt_cache=own, **options)
        assert run.answers[uid] == wanted
        assert recalled[uid][1][: len(tokens) + len(question)] == tokens + question


@pytest.mark.parametrize("verify", [None, "all"])
def test_one_that_is_given_up_leaves_what_it_has_read(model, verify):
    prompts = prompts_of(200, 150)
    recalled = {}
    options = {"memory": "recall", "verify": verify}
    run = Run(model, SNAPKV, on_recall=lambda uid, *told: recalled.update({uid: told}), **options)
    gone, stays = run.insert(prompts, 40)
    while len(run.answers.get(gone, [])) < 7:
        run.step()
    run.generator.remove([gone])
    run.finish()
    assert run.answers[stays] == alone(model, prompts[1], 40, policy=SNAPKV, **options)
    caches, tokens = recalled[gone]
    assert verify is None or len(tokens) > 204  # the answer's entries are exact
    full = make_prompt_cache(model)
    model(mx.array([tokens]), cache=full)
    assert [c.offset for c in caches] == [len(tokens)] * len(caches)
    for mine, plain in zip(caches, full):
        assert mx.allclose(mine.keys_and_values()[0], plain.keys_and_values()[0], atol=1e-4)
    assert_unpatched()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": SNAPKV, "verify": "all"}, "must be in memory"),
        ({"policy": SNAPKV, "memory": "recall:file", "verify": "all"}, "must be in memory"),
        (
            {"policy": SNAPKV, "memory": "recall", "far": "pull"},
            "far=pull needs a policy that evicts",
        ),
        ({"turns": True, "memory": "recall", "verify": "all"}, "needs a policy"),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(model, options, words):
    with pytest.raises(SnapKVError, match=words):
        CompressedBatchGenerator(model, **options)


# A hybrid, latents and entries that are borrowed, whose attention modules are called twice, attention sinks.
@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3", "gemma3n", "gpt_oss"])
@pytest.mark.parametrize("few", [0, 8192], ids=["index", "votes"])
def test_tokens_choose_together(name, few, monkeypatch):
    monkeypatch.setattr(full_view, "FEW", few)
    model, options = make_model(name), {"memory": "recall:file"}
    prompts = prompts_of(150, 120)
    run = Run(model, SNAPKV, **options)
    uids = run.insert(prompts, 15)
    together = set()
    while run.step():
        caches = members(run.generator._generation_batch.prompt_cache)
        together |= {len(c.members) for c in caches if hasattr(c, "members")}
    assert together == {1, 2}
    for uid, prompt in zip(uids, prompts):
        assert run.answers[uid] == alone(model, prompt, 15, policy=SNAPKV, **options)


def test_layers_that_read_different_numbers_of_entries_decode_alone(model):
    policy = SNAPKV.replace("budget=56", "budget=pyramid:56")
    prompts = prompts_of(150, 120)
    run = Run(model, policy, memory="recall")
    for uid, prompt in zip(run.staggered(prompts, [15, 15]), prompts):
        assert run.answers[uid] == alone(model, prompt, 15, policy=policy, memory="recall")


def test_a_hybrid_refuses_to_verify():
    with pytest.raises(SnapKVError, match="verify=all takes tokens back"):
        Run(make_qwen(), SNAPKV, memory="recall", verify="all")
