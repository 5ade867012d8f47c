"""`policy="auto"`: which setting is selected for each prompt, task and machine, and the reason given."""

import math
from dataclasses import replace

import pytest
from speed_helpers import LOSES, WINS_LATER, remember, speed

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
    CANDIDATES,
    CONVERSATION,
    FULL_CACHE_SHARE,
    KEEP_ALL,
    MIN_TOKENS_TO_EVICT,
    QUESTION,
    SMALL_BUDGET,
    SNAPKV,
    SPARSE,
    SPARSE_8BIT,
    AutoRequest,
    recommend,
    resolve,
    worth_comparing,
)
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.machine import Machine
from mlx_snapkv.planning.memory_plan import Planner
from mlx_snapkv.planning.settings import AUTO, resolve_compress
from mlx_snapkv.planning.speed_record import DECODE_SPARSE, SETUP

GB = 10**9
LONG = 20_000  # tokens


@pytest.fixture(scope="module")
def planner(demo_llama):
    return Planner(demo_llama[0])


def cost(planner, n, setting):
    """Return the peak memory, and the size of the entries, in bytes."""
    plan, kv = planner.memory_and_peak(n, AutoRequest(n).with_min_ctx(setting))
    return plan.peak, kv


@pytest.mark.parametrize(
    "n, task, lacks, setting, why",
    [
        (
            MIN_TOKENS_TO_EVICT - 1,
            QUESTION,
            None,
            KEEP_ALL,
            "at 10,931 tokens reading all entries costs little",
        ),
        (
            MIN_TOKENS_TO_EVICT,
            QUESTION,
            None,
            KEEP_ALL,
            "all entries of 10,932 tokens fit in memory",
        ),
        (MIN_TOKENS_TO_EVICT, BATCH, None, SNAPKV, "the question chooses"),
        (MIN_TOKENS_TO_EVICT, CONVERSATION, None, KEEP_ALL, "fit in memory"),
        (MIN_TOKENS_TO_EVICT, QUESTION, "KV memory", SPARSE_8BIT, "the full cache would take"),
        (MIN_TOKENS_TO_EVICT, CONVERSATION, "KV memory", SPARSE_8BIT, "and {} is available"),
        (MIN_TOKENS_TO_EVICT, BATCH, "KV memory", SMALL_BUDGET, "and {} is available"),
        (9000, QUESTION, "KV memory", SPARSE_8BIT, "the full cache would take"),
    ],
)
def test_auto_selects_a_setting_and_says_why(planner, n, task, lacks, setting, why):
    """`lacks` names the memory that is one byte too small for the first setting."""
    first = KEEP_ALL if n < MIN_TOKENS_TO_EVICT else CANDIDATES[task][0]
    _, kv = cost(planner, n, first)
    most = kv - 1 if lacks == "KV memory" else None
    taken = recommend(planner, AutoRequest(n, task, kv_memory=most), GB)
    assert taken.config == setting and taken.fits
    assert why.format(module.format_bytes(most or GB)) in str(taken)


@pytest.mark.parametrize("task, second", [(QUESTION, SNAPKV), (CONVERSATION, SPARSE_8BIT)])
def test_the_full_cache_leaves_memory_to_spare(planner, task, second):
    peak, _ = cost(planner, MIN_TOKENS_TO_EVICT, KEEP_ALL)
    enough = math.ceil(peak / FULL_CACHE_SHARE)
    assert recommend(planner, AutoRequest(MIN_TOKENS_TO_EVICT, task), enough + 1).config == KEEP_ALL
    taken = recommend(planner, AutoRequest(MIN_TOKENS_TO_EVICT, task), enough - 2)
    assert (
        taken.config == second
        and f"of the {module.format_bytes(enough - 2)} for models" in taken.why
    )


@pytest.mark.parametrize("task", [QUESTION, CONVERSATION])
def test_with_less_memory_the_next_setting_that_fits_is_selected(planner, task):
    """For a question, entries in 8 bits come before eviction within a budget, and files after it."""
    peaks = {
        setting: cost(planner, MIN_TOKENS_TO_EVICT, setting)[0] for setting in CANDIDATES[task]
    }
    for setting, peak in peaks.items():
        before = CANDIDATES[task][: CANDIDATES[task].index(setting)]
        taken = recommend(planner, AutoRequest(MIN_TOKENS_TO_EVICT, task), peak)
        if setting is not KEEP_ALL and all(peaks[other] > peak for other in before):
            assert taken.config == setting
        assert taken.config is not KEEP_ALL


def test_if_nothing_fits_or_can_be_compressed_auto_still_selects(planner, monkeypatch):
    taken = recommend(planner, AutoRequest(MIN_TOKENS_TO_EVICT), 10**6)
    assert not taken.fits and taken.config in CANDIDATES[QUESTION][1:]
    monkeypatch.setattr(planner, "can_compress", False)
    assert recommend(planner, AutoRequest(MIN_TOKENS_TO_EVICT), GB).config == KEEP_ALL


@pytest.mark.parametrize("n", [MIN_TOKENS_TO_EVICT - 8000, MIN_TOKENS_TO_EVICT])
@pytest.mark.parametrize("store", ["file", "8bit"])
def test_if_nothing_fits_the_smallest_setting_is_selected(planner, n, store):
    """The last candidate would be a bad choice, because it may leave the prompt uncompressed."""
    request = AutoRequest(n, required_sparse=Sparse(store=store), kv_memory=10**6)
    taken, sizes = recommend(planner, request, GB), {}
    assert not taken.fits and taken.plan.reason is None
    for setting in request.candidates():
        _, sizes[setting] = planner.memory_and_peak(n, request.with_min_ctx(setting))
    assert sizes[taken.config] == min(sizes.values())
    assert taken.config == CompressionConfig(Sparse(store=store))


def test_every_candidate_is_a_valid_setting(demo_llama, planner):
    for task in CANDIDATES:
        for setting in CANDIDATES[task]:
            AutoRequest(None, task).with_min_ctx(setting).require_supported(demo_llama[0])
    config, _, taken = resolve(demo_llama[0], None, CONVERSATION, {}, policy=AUTO)
    assert config.setting is None and taken.config == KEEP_ALL


def test_every_byte_of_the_peak_counts(demo_llama, planner, monkeypatch):
    """The peak includes the arrays of a chunk that is being read, not just entries."""
    peak, kv = cost(planner, MIN_TOKENS_TO_EVICT, SNAPKV)
    assert kv + planner.plan(1).weights < 0.9 * peak
    for usable, fits in ((peak, True), (peak - 1, False)):
        monkeypatch.setattr(module, "this_machine", lambda usable=usable: Machine(GB, usable))
        _, _, taken = resolve(demo_llama[0], MIN_TOKENS_TO_EVICT, BATCH, {}, policy=AUTO)
        assert (taken.config == SNAPKV) == fits


@pytest.mark.parametrize("asked", [{"policy": AUTO}, {"snapkv": True}])
def test_generate_step_takes_auto_and_reports_the_reason(demo_llama, asked):
    reports = []
    options = {"max_tokens": 1, "on_report": reports.append}
    next(generate_step(list(range(5, 105)), demo_llama[0], **options, **asked))
    (report,) = reports
    assert report.auto.startswith("auto: the full cache, because at 100 tokens")
    assert report.reason == "at 100 tokens reading all entries costs little"


def test_generate_step_compresses_with_the_selected_setting(demo_llama, monkeypatch):
    setting = CompressionConfig(resolve_compress(policy="streaming_llm:budget=50,schedule=once"))
    monkeypatch.setitem(module.CANDIDATES, QUESTION, (setting,))
    monkeypatch.setattr(module, "MIN_TOKENS_TO_EVICT", 60)
    reports = []
    options = {"max_tokens": 1, "policy": AUTO, "on_report": reports.append}
    next(generate_step(list(range(5, 105)), demo_llama[0], **options))
    assert reports[0].entries == 50 and "streaming_llm" in reports[0].auto


def test_conversations_and_batches_take_auto(demo_llama):
    model, tokenizer = demo_llama
    chat = Conversation(model, tokenizer, policy=AUTO)
    assert chat.policy is None
    for asked in ({"policy": AUTO}, {"snapkv": True}):
        found = batch_generate(model, tokenizer, [[7, 8, 9]], max_tokens=2, **asked)
        assert len(found.texts) == 1


BOTH = {"policy": AUTO, "snapkv": "top_k=64"}


def test_auto_with_snapkv_is_refused_as_two_policies(demo_llama):
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


@pytest.mark.parametrize("asked", [{"policy": AUTO}, {"snapkv": True}])
def test_functions_that_cannot_take_auto_say_so(demo_llama, asked):
    model, tokenizer = demo_llama
    ways = [
        lambda: CompressedBatchGenerator(model, **asked),
        lambda: plan_memory(model, 1000, **asked),
        lambda: inspect_prompt(model, tokenizer, [5, 6, 7], **asked),
        lambda: resolve_compress(**asked),
    ]
    for way in ways:
        with pytest.raises(SnapKVError, match="policy auto works only in generate"):
            way()


@pytest.mark.parametrize(
    "options, store, setting",
    [
        ({}, None, KEEP_ALL),
        ({}, "8bit", CompressionConfig(Sparse(store="8bit"))),
        ({"prompt_cache": []}, None, KEEP_ALL),
        ({"draft_model": "a model"}, None, KEEP_ALL),
    ],
)
def test_options_narrow_what_auto_selects_for_a_long_question(demo_llama, options, store, setting):
    config, _, taken = resolve(demo_llama[0], LONG, QUESTION, options, policy=AUTO, store=store)
    assert taken.config == setting == replace(config, has_draft_model=False)
    config.require_supported(demo_llama[0])
    where = "fit in memory in 8 bits" if setting.store == "8bit" else "fit in memory"
    assert setting.sparse is None or f"all entries {where}" in taken.why
    assert config.store == store


@pytest.mark.parametrize("n", [300, 600, 5000, 100_000])
def test_policies_worth_comparing_evict_at_least_three_quarters(n):
    first, within = (resolve_compress(policy=text) for text in worth_comparing(n))
    assert first.policy.budget <= n / 4 and within.decode_policy.budget < first.policy.budget
    assert n < 20_000 or resolve_compress(policy=worth_comparing(n)[0]) == SNAPKV.setting


# Selection by this machine's speed record.


LITTLE_FASTER = LOSES | {SETUP: (1e-3, 0), DECODE_SPARSE: (0.0116, 0)}


@pytest.mark.parametrize("task", [QUESTION, CONVERSATION])
@pytest.mark.parametrize(
    "lines, setting", [(LOSES, KEEP_ALL), (LITTLE_FASTER, KEEP_ALL), (WINS_LATER, SPARSE)]
)
def test_sparse_attention_is_selected_if_it_was_clearly_faster(planner, lines, setting, task):
    request = AutoRequest(LONG, task, speed=speed(lines))
    taken = recommend(planner, request, 10 * GB)
    assert taken.config == setting and taken.fits
    if setting == SPARSE:
        words = "on this machine an answer of 256 tokens to a prompt of 20,000 takes about 86% of the full"
        assert words in taken.why
        assert recommend(planner, replace(request, task=BATCH), 10 * GB).config == SNAPKV
        for other in ({"may_be_sparse": False}, {"kv_bits": 8}):
            assert recommend(planner, replace(request, **other), 10 * GB).config == KEEP_ALL


def test_a_faster_setting_that_does_not_fit_is_not_selected(planner):
    """Sparse attention needs more memory than the full cache."""
    request = AutoRequest(LONG, speed=speed(WINS_LATER))
    peaks = {setting: cost(planner, LONG, setting)[0] for setting in (SPARSE, SNAPKV)}
    enough = math.ceil(peaks[SPARSE] / FULL_CACHE_SHARE)
    assert recommend(planner, request, enough + 1).config == SPARSE
    taken = recommend(planner, request, enough - 2)
    assert taken.config != SPARSE and "sparse would take" in taken.why
    slow = AutoRequest(LONG, CONVERSATION, speed=speed(LOSES))
    assert recommend(planner, slow, peaks[SNAPKV]).config == SPARSE_8BIT  # nothing else fits


def test_auto_reads_the_record(demo_llama, record):
    model = demo_llama[0]
    assert resolve(model, LONG, QUESTION, {}, policy=AUTO)[0].sparse is None
    remember(model, WINS_LATER)
    config, _, taken = resolve(model, LONG, QUESTION, {}, policy=AUTO)
    assert config.sparse == SPARSE.sparse and "of the full cache's time" in str(taken)
