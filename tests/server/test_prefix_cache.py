"""Many questions about one document need the memory and disk space of only one."""

import gc
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache
from server_helpers import ask, serving, talk

from mlx_snapkv import Sparse
from mlx_snapkv.server.prefix_cache import PrefixCache

DOCUMENT = list(range(320))
SPARSE = Sparse(budget=256, store="file")


def of(n, kind=KVCache):
    cache = kind(16) if kind is RotatingKVCache else kind()
    cache.update_and_fetch(*mx.zeros((2, 1, 1, n, 8)))
    return [cache]


def kept(prefixes):
    return [prefix.ids[320:].tolist() for prefix in prefixes._prefixes]


def test_when_room_is_short_the_newest_question_of_a_document_replaces_the_others():
    prefixes = PrefixCache(1 << 30)
    other, long_answer = list(range(5000, 5340)), [*DOCUMENT, *range(2000, 2100)]
    prefixes.insert(other, of(340))
    prefixes.insert(long_answer, of(420))
    for question in range(1000, 1004):
        prefixes.insert([*DOCUMENT, *[question] * 20], of(340))
    one = of(340)[0].nbytes
    assert prefixes.nbytes == 6 * one
    prefixes.trim_to(5 * one)
    assert [tail[0] for tail in kept(prefixes)[2:]] == [1001, 1002, 1003]
    prefixes.trim_to(4 * one)
    assert prefixes.nbytes == 4 * one
    prefixes.max_bytes = 3 * one
    prefixes.insert([*DOCUMENT, *[1004] * 20], of(340))
    assert [len(tail) for tail in kept(prefixes)] == [20, 100, 20]
    assert prefixes.fetch([*DOCUMENT, 1004, 1, 1], 1)[1] == 321
    prefixes.trim_to(one)
    assert prefixes.fetch([*long_answer, 1], 1)[1] == 420
    prefixes.insert([*long_answer, 7, 7], of(422))  # replaces its own beginning
    assert prefixes.nbytes == one


def test_caches_that_cannot_be_cut_serve_only_continuations_and_are_evicted_by_age():
    prefixes = PrefixCache(1 << 30)
    prefixes.insert(list(range(5000, 5320)), of(320))
    for question in range(1000, 1003):
        prefixes.insert([*DOCUMENT, question], of(321, RotatingKVCache))
    assert prefixes.fetch([*DOCUMENT, 1001, 1], 1)[1] == 321
    assert prefixes.fetch([*DOCUMENT, 1, 1], 1) == ([], 0)
    prefixes.trim_to(prefixes.nbytes - 1)
    assert kept(prefixes) == [[1000], [1001], [1002]]


def test_the_size_that_other_threads_see_never_exceeds_the_limit(monkeypatch):
    sizes, set_prefixes = [], PrefixCache._set_prefixes

    def noted(self, prefixes):
        set_prefixes(self, prefixes)
        sizes.append(self.nbytes)

    monkeypatch.setattr(PrefixCache, "_set_prefixes", noted)
    prefixes = PrefixCache(3 * of(320)[0].nbytes)
    for first in range(10):
        prefixes.insert([first, *DOCUMENT[1:]], of(320))
    assert len(sizes) >= 10 and max(sizes) == prefixes.max_bytes == prefixes.nbytes


def test_a_prefix_larger_than_the_limit_evicts_nothing(caplog):
    prefixes = PrefixCache(2 * of(320)[0].nbytes)
    prefixes.insert(DOCUMENT, of(320))
    prefixes.insert(list(range(1000, 2500)), of(1500))
    caches, n = prefixes.fetch(DOCUMENT, 1)
    assert prefixes.nbytes == of(320)[0].nbytes and n == caches[0].offset == 319
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("1,500 tokens are not kept") and "--prefix-bytes" in told


def test_prefixes_take_no_more_memory_than_they_count():
    with serving(policy=None) as served:

        def post(n):
            body = {"prompt": f"{n} " * 600, "max_tokens": 4 + 8 * n, "logit_bias": {"1": -100}}
            assert served.post("/v1/completions", body).status_code == 200

        post(0)  # computes the weights
        gc.collect()
        prefixes = served.engine.loaded.prefixes
        before = mx.get_active_memory() - prefixes.nbytes
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(post, range(6)))
        while served.metric("mlx_snapkv_open_requests"):
            pass
        while served.metric('mlx_snapkv_kv_bytes{kind="requests"}'):
            pass
        gc.collect()
        assert mx.get_active_memory() - before < 1.05 * prefixes.nbytes


def test_questions_about_one_document_share_its_entries(document):
    """The limit has room for two documents. The other document stays in the cache throughout."""
    text, facts = document
    with serving(policy=SPARSE) as served:
        prefixes, other = served.engine.loaded.prefixes, f"Another one. {text}"
        ask(served, talk(f"{other} What is it?"))
        prefixes.max_bytes = 5 * (prefixes.nbytes + prefixes.file_nbytes) // 2
        for i, fact in enumerate(facts[:3]):
            answer, known, _ = ask(served, talk(f"{text} {fact.question}"))
            assert (answer, known > 1400) == (fact.value, i > 0)
            assert prefixes.nbytes + prefixes.file_nbytes <= prefixes.max_bytes
        assert ask(served, talk(f"{other} What was it?"))[1] > 1400


def test_a_clock_in_the_system_prompt_is_reported_once_with_advice(served, caplog):
    """A different prompt or a change in the last line is not reported."""
    rules = "".join(f"Rule {n} is that the garden is behind the house.\n" for n in range(20))
    prompts = [f"Time: 10:0{n}\n{rules}" for n in range(3)]
    prompts += [f"Rules\nIt is {day}day.\n{rules}" for day in ("Mon", "Tues")]
    prompts += [f"{rules}Time: 10:0{n}" for n in range(2)] + ["Be brief."]
    for text in prompts:
        ask(served.client, [{"role": "system", "content": text}, *talk("Hello")], max_tokens=1)
    first, second = (m for m in caplog.messages if "changes between requests" in m)
    assert first.startswith("line 1 ") and "--volatile-header Time" in first
    assert second.startswith("line 2 ") and "last message" in second
    assert "--volatile" not in second
