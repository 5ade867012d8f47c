"""`policy="auto"`: what is taken for which prompt, task and machine, and why."""

import pytest

from mlx_snapkv import Conversation, SnapKV, batch_generate, generate_step
from mlx_snapkv.planning import auto as module
from mlx_snapkv.planning.auto import (
    AUTO,
    BATCH,
    BOOK,
    CONVERSATION,
    FEW,
    FULL,
    QUESTION,
    RECALLED,
    SETTINGS,
    SNAPKV,
    Cost,
    auto,
    recommended,
    worth_comparing,
)
from mlx_snapkv.policies import resolve_policy

GB = 10**9


def cost(setting):
    return Cost(12 * GB, 4 * GB) if setting in (FULL, SNAPKV, RECALLED) else Cost(9 * GB, GB)


@pytest.mark.parametrize(
    "n, task, usable, kv_memory, setting, why",
    [
        (FEW - 1, QUESTION, 16 * GB, None, FULL, "fewer than half of 10,931 entries would be evicted"),
        (FEW, QUESTION, 16 * GB, None, SNAPKV, "the question chooses"),
        (FEW, BATCH, 16 * GB, None, SNAPKV, "decoded together"),
        (FEW, CONVERSATION, 16 * GB, None, RECALLED, "every token"),
        (FEW, CONVERSATION, 10 * GB, None, BOOK, "would take 12 GB, and 10 GB may be used"),
        (FEW, QUESTION, 16 * GB, 2 * GB, SETTINGS[QUESTION][1], "take 4 GB, and 2 GB may be used"),
        (9, QUESTION, 16 * GB, 2 * GB, SETTINGS[QUESTION][1], "the full cache would take 4 GB"),
    ],
)  # fmt: skip
def test_what_is_taken(n, task, usable, kv_memory, setting, why):
    taken = recommended(n, task, cost, usable, kv_memory=kv_memory)
    assert taken.setting == setting and taken.fits and why in str(taken)


def test_where_nothing_fits_or_nothing_can_be_compressed():
    taken = recommended(FEW, QUESTION, cost, GB)
    assert not taken.fits and taken.setting == SETTINGS[QUESTION][-1]
    assert recommended(FEW, QUESTION, cost, GB, can_compress=False).setting == FULL


def test_every_setting_is_a_policy_and_a_memory(demo_llama):
    for task in SETTINGS:
        for setting in SETTINGS[task]:
            resolve_policy(policy=setting.policy)
    taken = auto(demo_llama[0], None, CONVERSATION)
    assert taken.policy(FEW) == SnapKV(top_k=4096, min_ctx=FEW) and taken.setting == RECALLED
    smallest = auto(demo_llama[0], 16_000, QUESTION, kv_memory=10**7)
    assert smallest.fits and smallest.setting.policy.startswith("keydiff:budget=")


@pytest.mark.parametrize("asked", [{"policy": AUTO}, {"snapkv": True}])
def test_python_takes_it_and_the_report_tells(demo_llama, asked):
    reports = []
    options = {"max_tokens": 1, "on_report": reports.append, "verify": None}
    next(generate_step(list(range(5, 105)), demo_llama[0], **options, **asked))
    (report,) = reports
    assert report.auto.startswith("auto: the full cache, because fewer than half")
    assert report.reason == "fewer than half of 100 entries would be evicted"


def test_python_compresses_by_it(demo_llama, monkeypatch):
    setting = module.Setting("streaming_llm:budget=50,schedule=once")
    monkeypatch.setitem(module.SETTINGS, QUESTION, (setting,))
    monkeypatch.setattr(module, "FEW", 60)
    reports = []
    options = {"max_tokens": 1, "policy": AUTO, "on_report": reports.append}
    next(generate_step(list(range(5, 105)), demo_llama[0], **options))
    assert reports[0].entries == 50 and "streaming_llm" in reports[0].auto


def test_conversations_and_batches_take_it(demo_llama):
    model, tokenizer = demo_llama
    chat = Conversation(model, tokenizer, policy=AUTO)
    assert chat.policy == SnapKV(top_k=4096, min_ctx=FEW) and chat.memory == "recall"
    found = batch_generate(model, tokenizer, [[7, 8, 9]], policy=AUTO, max_tokens=2)
    assert len(found.texts) == 1


@pytest.mark.parametrize("n", [300, 600, 5000, 100_000])
def test_what_is_worth_comparing_evicts_three_quarters_at_least(n):
    first, second, within = (resolve_policy(policy=text) for text in worth_comparing(n))
    assert second.budget < first.budget <= max(n / 4, 30) and within.stages[1].budget < first.budget
    assert n < 20_000 or worth_comparing(n)[0] == SNAPKV.policy
