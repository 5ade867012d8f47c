"""Any order of arrivals, lengths, removals and extractions."""

from batch_helpers import Run, alone, prompts_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import make_llama

MODEL = make_llama()
RECALL = "snapkv:n_sink=2,n_window=8,obs_window=8,min_ctx=60,budget=24,lookahead=2"
POLICIES = [
    RECALL,  # whose tokens choose anew
    "snapkv:n_sink=2,n_window=8,obs_window=8,min_ctx=60,budget=30%,lookahead=4",
    "snapkv:n_sink=2,n_window=8,obs_window=8,budget=24,lookahead=2",
    "snapkv:n_sink=2,obs_window=8,budget=40,n_window=24,on_full=keydiff,lookahead=4",
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


# taken out before it is compressed
@example(POLICIES[0], [("insert", 116, 11), ("step", 6, 0), ("extract", 0, 0)], False)
# a copy of what goes on
@example(RECALL, [("insert", 100, 30), ("step", 12, 0), ("extract", 0, 0)], False)
@given(st.sampled_from(POLICIES), EVENTS, st.booleans())
@settings(max_examples=25)
def test_every_answer_is_the_one_alone(policy, events, reads_first):
    options = {"memory": "recall"} if policy == RECALL else {}
    run = Run(MODEL, policy, prefill_step_size=48, reads_first=reads_first, **options)
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
                compressed = uid in run.reports  # before, it is full
                way = {"policy": policy, **options} if compressed else {}
                extracted.append((uid, cache, list(tokens), way, [c.size() for c in cache]))
    run.finish()
    wanted = {uid: alone(MODEL, p, n, policy=policy, **options) for uid, (p, n) in inserted.items()}
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
