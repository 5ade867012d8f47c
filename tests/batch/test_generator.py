"""Requests in a batch get the same answers as alone, whichever other requests join or leave."""

import mlx.core as mx
import pytest
from batch_helpers import Run, alone, prompts_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from request_helpers import assert_unpatched, plain
from speed_helpers import LOSES, WINS_LATER, remember
from tiny_models import make_llama, make_qwen

from mlx_snapkv import SnapKVError, Sparse, prefill
from mlx_snapkv.batch.generator import CompressedBatchGenerator
from mlx_snapkv.engine import loop_model
from mlx_snapkv.planning.speed_record import SETUP

PLAIN = "snapkv:n_sink=4,n_window=32,obs_window=32"
SNAPKV = f"{PLAIN},on_full=slide,lookahead=4"
SMALL = f"{SNAPKV},budget=56"
STAGES = f"keydiff:budget=90,block=32 then {SNAPKV},budget=50"
POLICIES = [
    f"{SNAPKV},min_ctx=100,budget=40%",
    f"{PLAIN},budget=56,lookahead=0",
    "snapkv:n_sink=4,budget=84,n_window=64,on_full=slide,lookahead=4",
    STAGES,
    "h2o:budget=48,block=16",
]


@pytest.mark.parametrize(
    ("make", "policy"),
    [*((make_llama, policy) for policy in POLICIES), (make_qwen, POLICIES[0]), (make_qwen, STAGES)],
)
def test_staggered_requests_answer_as_by_themselves(make, policy):
    prompts, limits = prompts_of(190, 40, 260, 120, 75), [12, 50, 30, 15, 7]
    run = Run(make(), policy)
    run.assert_alone(run.staggered(prompts, limits), prompts, limits)
    assert_unpatched()


def test_a_prompt_that_is_being_read_can_be_extracted_and_removed(tiny_model):
    prompts = prompts_of(300, 120)
    run = Run(tiny_model, SMALL, prefill_step_size=64)
    uids = run.insert(prompts, 10)
    run.step(), run.step()
    cache, tokens = run.generator.extract_cache(uids)[uids[0]]
    assert 0 < len(tokens) < 300
    rest = plain(tiny_model, mx.array(prompts[0][len(tokens) :]), 10, prompt_cache=cache)
    assert [int(t) for t, _ in rest] == alone(tiny_model, prompts[0], 10)
    run.generator.remove([uids[0]])
    assert run.finish() == {uids[1]: run.alone(prompts[1], 10)}


def test_requests_with_and_without_compression_run_in_one_batch(tiny_model):
    (prompt,) = prompts_of(190)
    run = Run(tiny_model, SMALL)
    (uid,) = run.insert([prompt], 12)
    (full,) = run.generator.insert_segments([[prompt]], [12], in_full=True)
    wanted = [int(t) for t, _ in plain(tiny_model, mx.array(prompt), 12)]
    assert run.finish() == {uid: run.alone(prompt, 12), full: wanted}
    assert run.reports[uid].compressed and not run.reports[full].compressed


def test_a_slow_chunk_calls_on_pause(monkeypatch):
    """Ctrl-C must take effect within a second."""
    monkeypatch.setattr(loop_model, "MIN_SECONDS", 0)
    monkeypatch.setattr(loop_model, "PROGRESS_INTERVAL", 0)
    paused = []
    run = Run(make_llama(), SMALL, on_pause=lambda *at: paused.append(at))
    run.insert(prompts_of(300), 1)
    run.step()
    assert paused


def test_with_reads_first_all_prompts_are_read_before_answers_continue():
    prompts = prompts_of(400, 300, 200)
    run = Run(make_llama(), SMALL, reads_first=True, prefill_step_size=64)
    uids = run.insert(prompts, 12)
    run.step()
    while run.generator._prompt_batch.uids or run.generator._unprocessed_sequences:
        run.step()
        assert all(len(answer) <= 5 for answer in run.answers.values())  # the lookahead's tokens
    run.finish()
    run.assert_alone(uids, prompts, [12] * 3)


def test_segments_and_all_tokens_are_reported_as_mlx_lm_does(tiny_model):
    prompt = prompts_of(200)[0]
    run = Run(tiny_model, SMALL)
    (uid,) = run.generator.insert_segments([[prompt[:70], prompt[70:150], prompt[150:]]], [15])
    ends = 0
    while uid not in run.answers:
        ends += sum(response.end_of_segment for response in run.step()[0])
    run.finish()
    assert run.answers[uid] == run.alone(prompt, 15)
    assert run.last[uid].all_tokens == prompt + run.answers[uid]
    assert ends >= 3


@pytest.mark.parametrize("policy", [SMALL, "h2o:budget=48,block=16"])
def test_later_turns_continue_from_compressed_caches(tiny_model, policy):
    first, second = prompts_of(200, 50, seed=3)
    run = Run(tiny_model, policy)
    own, _ = prefill(tiny_model, first, policy)
    (uid,) = run.insert([second], 10, caches=[own], all_tokens=[list(first)])
    other = run.insert(prompts_of(150), 10)
    run.finish()
    cache, _ = prefill(tiny_model, first, policy)
    assert run.answers[uid] == alone(tiny_model, second, 10, prompt_cache=cache)
    assert "already holds tokens" in run.reports[uid].reason
    assert other[0] in run.answers
    assert own[-1].offset == len(first)  # the caller's cache is unchanged


@pytest.mark.parametrize("policy", [SMALL, Sparse(budget=40, n_window=16, when="always")])
def test_keys_may_depend_on_the_tensors_that_a_pipeline_sends(policy, monkeypatch):
    """After every call, mlx-lm's pipeline models add a dependency to the last cache's keys."""
    model, prompts = make_llama(), prompts_of(200, 150)
    wanted = [alone(model, prompt, 9, policy=policy) for prompt in prompts]
    call = type(model).__call__

    def sends(self, inputs, cache=None):
        logits = call(self, inputs, cache=cache)
        cache[-1].keys = mx.depends(cache[-1].keys, logits)
        return logits

    monkeypatch.setattr(type(model), "__call__", sends)
    run = Run(model, policy)
    uids = run.insert(prompts, 9)
    assert [run.finish()[uid] for uid in uids] == wanted


def test_unsupported_options_and_empty_prompts_are_refused_before_reading(tiny_model):
    run = Run(tiny_model, f"{SNAPKV},budget=40")
    assert run.generator.next() == ([], [])
    for bad in ({"max_kv_size": 100}, {"kv_bits": 5}):
        with pytest.raises(SnapKVError):
            CompressedBatchGenerator(tiny_model, policy=SNAPKV, **bad)
    with pytest.raises(ValueError, match="empty prompt"):
        run.generator.insert([[]])


MODEL = make_llama()
SPARSE = Sparse(n_sink=2, n_window=8, budget=24, when="always")
ANY_POLICIES = [
    SPARSE,
    "snapkv:n_sink=2,n_window=8,obs_window=8,min_ctx=60,budget=30%,lookahead=4",
    "snapkv:n_sink=2,n_window=8,obs_window=8,budget=24,lookahead=2",
    "snapkv:n_sink=2,obs_window=8,budget=40,n_window=24,on_full=slide,lookahead=4",
    "keydiff:budget=24,block=8",
    "tova:budget=24,block=8",
]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.integers(1, 140), st.integers(1, 40)),
        st.tuples(st.just("step"), st.integers(1, 12), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("extract"), st.integers(0, 9), st.just(0)),
    ),
    min_size=4,
    max_size=16,
)


# The request is extracted before it is compressed.
@example(ANY_POLICIES[0], [("insert", 116, 11), ("step", 6, 0), ("extract", 0, 0)], False)
# The request is extracted while its answer continues.
@example(SPARSE, [("insert", 100, 30), ("step", 12, 0), ("extract", 0, 0)], False)
@given(st.sampled_from(ANY_POLICIES), EVENTS, st.booleans())
@settings(max_examples=15)
def test_answers_equal_answers_by_themselves_after_any_events(policy, events, reads_first):
    run = Run(MODEL, policy, prefill_step_size=48, reads_first=reads_first)
    inserted, removed, extracted = {}, set(), []
    for event, a, b in events:
        if event == "insert":
            prompt = prompts_of(a, seed=len(inserted))[0]
            (uid,) = run.insert([prompt], b)
            inserted[uid] = prompt, b
        elif event == "step":
            for _ in range(a):
                run.step()
        elif event == "remove":
            run.generator.remove([a])
            removed.add(a)
        else:
            for uid, (cache, tokens) in run.generator.extract_cache([a]).items():
                compressed = uid in run.reports  # before its report a request has all entries
                way = {"policy": policy} if compressed else {}
                extracted.append((uid, cache, list(tokens), way, [c.size() for c in cache]))
    run.finish()
    wanted = {uid: alone(MODEL, p, n, policy=policy) for uid, (p, n) in inserted.items()}
    for uid in inserted:
        answer = run.answers.get(uid, [])
        assert answer == wanted[uid][: len(answer)]
        assert uid in removed or answer == wanted[uid]
    for uid, cache, tokens, way, sizes in extracted:
        assert [c.size() for c in cache] == sizes
        prompt, n = inserted[uid]
        answer = alone(MODEL, prompt, n, **way)
        said = len(tokens) - len(prompt)
        if 0 < said < len(answer):
            rest = alone(MODEL, [answer[said]], len(answer) - said - 1, prompt_cache=cache)
            assert rest == answer[said + 1 :]


@pytest.mark.parametrize("when", ["faster", "always"])
@pytest.mark.parametrize("make", [make_llama, make_qwen])
def test_requests_follow_the_speed_record(make, when, record):
    """Batched requests don't measure speed. A request that the record predicts to be slower keeps all entries."""
    model, (prompt,) = make(), prompts_of(190)
    sparse = Sparse(budget=60, n_sink=4, n_window=16, when=when)
    for lines, is_compressed in ((None, True), (WINS_LATER, when == "always"), (LOSES, when == "always")):  # fmt: skip
        if lines is not None:
            record.unlink(missing_ok=True)
            remember(model, lines, sparse)
        before = record.read_bytes() if lines else None
        run = Run(model, None, sparse=sparse)
        uids = run.insert([prompt, prompt], 24)
        run.finish()
        for uid in uids:
            assert run.reports[uid].compressed == is_compressed
            if not is_compressed:
                wanted = [int(t) for t, _ in plain(model, mx.array(prompt), 24)]
                assert run.answers[uid] == wanted
                assert "takes longer with sparse attention" in run.reports[uid].reason
        assert (record.read_bytes() if lines else None) == before


def test_a_record_of_longer_texts_lets_requests_choose(record):
    """Sparse attention is faster only above some length, which just one of the two requests reaches."""
    model = make_llama()
    sparse = Sparse(budget=60, n_sink=4, n_window=16)
    lines = {kind: (a, 100 * b) for kind, (a, b) in WINS_LATER.items()} | {SETUP: (1e-3, 0)}
    remember(model, lines, sparse)
    run = Run(model, None, sparse=sparse)
    short, long = run.insert(prompts_of(80, 700), 4)
    run.finish()
    assert run.reports[long].compressed and not run.reports[short].compressed
