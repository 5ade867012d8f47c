"""`policy="auto"`: what is taken for which prompt, task and machine, and why."""

import pytest

from mlx_snapkv import (
    CompressedBatchGenerator,
    Conversation,
    SnapKVError,
    Sparse,
    batch_generate,
    generate_step,
    inspect_prompt,
    plan_memory,
    stream_generate,
)
from mlx_snapkv.planning import auto as module
from mlx_snapkv.planning.auto import (
    BATCH,
    CONVERSATION,
    FEW,
    FILED,
    FULL,
    PACKED,
    QUESTION,
    SETTINGS,
    SMALL,
    SNAPKV,
    SPARSE,
    AutoRequest,
    recommended,
    resolve,
    worth_comparing,
)
from mlx_snapkv.planning.machine import Machine
from mlx_snapkv.planning.memory_plan import Planner
from mlx_snapkv.policies import AUTO, method_named, resolve_policy

GB = 10**9
LONG = 20_000  # tokens


@pytest.fixture(scope="module")
def planner(demo_llama):
    return Planner(demo_llama[0])


def cost(planner, n, setting):
    """The most bytes in use, and those of entries."""
    plan, kv = planner.planned(n, AutoRequest(n).config(setting))
    return plan.peak, kv


@pytest.mark.parametrize(
    "n, task, lacks, setting, why",
    [
        (FEW - 1, QUESTION, None, FULL, "at 10,931 tokens reading all entries costs little"),
        (FEW, QUESTION, None, SPARSE, "all entries fit in memory"),
        (FEW, BATCH, None, SNAPKV, "the question chooses"),
        (FEW, CONVERSATION, None, SPARSE, "every token"),
        (FEW, CONVERSATION, "memory", PACKED, "and {} is available"),
        (FEW, QUESTION, "KV memory", PACKED, "and {} is available"),
        (FEW, BATCH, "KV memory", SMALL, "and {} is available"),
        (9000, QUESTION, "KV memory", PACKED, "the full cache would take"),
    ],
)
def test_what_is_taken(planner, n, task, lacks, setting, why):
    """`lacks`: of what a byte is missing for the first setting."""
    first = FULL if n < FEW else SETTINGS[task][0]
    peak, kv = cost(planner, n, first)
    usable = peak - 1 if lacks == "memory" else GB
    most = kv - 1 if lacks == "KV memory" else None
    taken = recommended(planner, AutoRequest(n, task, kv_memory=most), usable)
    limit = module.format_bytes(most or usable)
    assert taken.setting == setting and taken.fits and why.format(limit) in str(taken)


@pytest.mark.parametrize("task", [QUESTION, CONVERSATION])
def test_less_memory_takes_the_next_setting_that_reads_all_entries_then_policies(planner, task):
    """From all entries in memory over 4 bits to files, whose indexes stay; what is less is evicted."""
    found = [cost(planner, FEW, setting)[0] for setting in SETTINGS[task][:3]]
    assert found == sorted(found, reverse=True)
    for peak, setting in zip(found, (SPARSE, PACKED, FILED)):
        assert recommended(planner, AutoRequest(FEW, task), peak).setting == setting
    assert not recommended(planner, AutoRequest(FEW, task), found[-1] - 1).setting.is_sparse


def test_where_nothing_fits_or_nothing_can_be_compressed(planner, monkeypatch):
    taken = recommended(planner, AutoRequest(FEW), 10**6)
    assert not taken.fits and taken.setting == SETTINGS[QUESTION][-1]
    monkeypatch.setattr(planner, "can_compress", False)
    assert recommended(planner, AutoRequest(FEW), GB).setting == FULL


@pytest.mark.parametrize("n", [FEW - 8000, FEW])
@pytest.mark.parametrize("store", ["file", "4bit"])
def test_what_takes_the_least_does(planner, n, store):
    """Not the last of a list, which may even leave the prompt as it is."""
    request = AutoRequest(n, options={"store": store}, kv_memory=10**6)
    taken, sizes = recommended(planner, request, GB), {}
    assert not taken.fits and taken.plan.reason is None
    for setting in request.settings():
        _, sizes[setting] = planner.planned(n, request.config(setting))
    assert sizes[taken.setting] == min(sizes.values())
    assert (taken.setting.store, taken.setting.is_sparse) == (store, True)


def test_every_setting_is_a_policy_and_a_memory(demo_llama, planner):
    for task in SETTINGS:
        for setting in SETTINGS[task]:
            AutoRequest(None, task).config(setting).require(demo_llama[0])
    config, _, taken = resolve(demo_llama[0], None, CONVERSATION, {}, policy=AUTO)
    assert config.policy == Sparse() and taken.setting == SPARSE


def test_every_byte_of_the_peak_counts(demo_llama, planner, monkeypatch):
    """Not only the entries: what a chunk holds while it is read, too."""
    for task, first in ((QUESTION, SPARSE), (BATCH, SNAPKV)):
        peak, kv = cost(planner, FEW, first)
        assert kv + planner.plan(1).weights < 0.9 * peak
        for usable, fits in ((peak, True), (peak - 1, False)):
            monkeypatch.setattr(module, "this_machine", lambda usable=usable: Machine(GB, usable))
            _, _, taken = resolve(demo_llama[0], FEW, task, {}, policy=AUTO)
            assert (taken.setting == first) == fits


@pytest.mark.parametrize("asked", [{"policy": AUTO}, {"snapkv": True}])
def test_python_takes_it_and_the_report_tells(demo_llama, asked):
    reports = []
    options = {"max_tokens": 1, "on_report": reports.append}
    next(generate_step(list(range(5, 105)), demo_llama[0], **options, **asked))
    (report,) = reports
    assert report.auto.startswith("auto: the full cache, because at 100 tokens")
    assert report.reason == "at 100 tokens reading all entries costs little"


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
    assert chat.policy == Sparse() and chat.store == "memory"
    for asked in ({"policy": AUTO}, {"snapkv": True}):
        found = batch_generate(model, tokenizer, [[7, 8, 9]], max_tokens=2, **asked)
        assert len(found.texts) == 1


BOTH = {"policy": AUTO, "snapkv": "top_k=64"}


def test_auto_and_a_snapkv_are_two_policies(demo_llama):
    model, tokenizer = demo_llama
    ways = [
        lambda: generate_step([5, 6, 7], model, **BOTH),
        lambda: stream_generate(model, tokenizer, [5, 6, 7], **BOTH),
        lambda: batch_generate(model, tokenizer, [[5, 6, 7]], **BOTH),
        lambda: CompressedBatchGenerator(model, **BOTH),
        lambda: plan_memory(model, 1000, **BOTH),
        lambda: inspect_prompt(model, tokenizer, [5, 6, 7], **BOTH),
        lambda: generate_step([5, 6, 7], model, snapkv=True, policy="tova"),
    ]
    for way in ways:
        with pytest.raises(SnapKVError, match="snapkv and policy both name a policy"):
            way()


def test_auto_and_sparse_are_one_too_many(demo_llama):
    with pytest.raises(SnapKVError, match="policy=auto chooses how entries are used, and so does"):
        generate_step([5, 6, 7], demo_llama[0], policy=AUTO, sparse=True)


@pytest.mark.parametrize("asked", [{"policy": AUTO}, {"snapkv": True}])
def test_what_can_not_choose_says_so(demo_llama, asked):
    model, tokenizer = demo_llama
    ways = [
        lambda: CompressedBatchGenerator(model, **asked),
        lambda: plan_memory(model, 1000, **asked),
        lambda: inspect_prompt(model, tokenizer, [5, 6, 7], **asked),
        lambda: resolve_policy(**asked),
    ]
    for way in ways:
        with pytest.raises(SnapKVError, match="policy auto works only in generate"):
            way()


@pytest.mark.parametrize(
    "options, setting",
    [
        ({}, SPARSE),
        ({"store": "8bit"}, SPARSE._replace(store="8bit")),
        # Whoever gives a cache goes on from entries in memory.
        ({"prompt_cache": []}, SNAPKV),
        ({"draft_model": "a model"}, SNAPKV),
    ],
)  # fmt: skip
def test_a_long_question(demo_llama, options, setting):
    config, _, taken = resolve(demo_llama[0], LONG, QUESTION, options, policy=AUTO)
    assert taken.setting == setting and config.store == setting.store
    assert config.policy == method_named(setting.method)
    config.require(demo_llama[0])
    where = "fit in memory in 8 bits" if setting.store == "8bit" else "fit in memory"
    assert not setting.is_sparse or f"all entries {where}" in taken.why
    assert config.keywords == {"store": setting.store}


def test_what_no_setting_can_be_combined_with(demo_llama):
    for options, words in ():
        with pytest.raises(SnapKVError, match=words):
            generate_step([5] * LONG, demo_llama[0], policy=AUTO, **options)


@pytest.mark.parametrize("n", [300, 600, 5000, 100_000])
def test_what_is_worth_comparing_evicts_three_quarters_at_least(n):
    first, within = (resolve_policy(policy=text) for text in worth_comparing(n))
    assert first.budget <= n / 4 and within.stages[1].budget < first.budget
    assert n < 20_000 or worth_comparing(n)[0] == SNAPKV.method
