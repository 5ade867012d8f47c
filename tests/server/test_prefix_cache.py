"""Many questions of one document take the memory, and the disk, of one."""

import random

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from server_helpers import serving

from mlx_snapkv.demo.questions import make_haystack
from mlx_snapkv.server.prefix_cache import PrefixCache
from mlx_snapkv.server.prefix_files import PrefixFiles, covers


def of(n, kind=KVCache):
    cache = kind(16) if kind is RotatingKVCache else kind()
    cache.update_and_fetch(*mx.zeros((2, 1, 1, n, 8)))
    return [cache]


def has_all_but_a_tail(n_common, n):
    """Whether tokens that begin as `n` others do, by `n_common`, cover those."""
    return covers(np.array([*range(n_common), -1, -2]), np.arange(n))


def test_a_tail_is_a_sixteenth_at_most():
    assert has_all_but_a_tail(150, 160) and has_all_but_a_tail(160, 160)
    assert has_all_but_a_tail(5, 5)
    assert not has_all_but_a_tail(149, 160) and not has_all_but_a_tail(4, 5)
    assert not has_all_but_a_tail(0, 16)
    assert not covers(np.arange(4), np.arange(5)) and covers(np.arange(150), np.arange(160))


def kept(prefixes):
    return [tokens[320:] for tokens in prefixes._known()]


def test_where_room_is_short_the_newest_question_of_a_document_stands_for_the_others():
    document, prefixes = list(range(320)), PrefixCache(1 << 30)
    other, long_answer = list(range(5000, 5340)), [*document, *range(2000, 2100)]
    prefixes.insert(other, of(340))
    prefixes.insert(long_answer, of(420))
    for question in range(1000, 1004):
        prefixes.insert([*document, *[question] * 20], of(340))
    assert len(prefixes) == 6
    one = prefixes.nbytes // 6
    prefixes.trim_to(n_sequences=5)
    assert [tail[0] for tail in kept(prefixes)[2:]] == [1001, 1002, 1003]
    prefixes.trim_to(n_bytes=4 * one)
    assert prefixes.nbytes == 4 * one == prefixes.stats_by_type()["assistant"]["n_bytes"]
    prefixes._most_bytes = 3 * one
    prefixes.insert([*document, *[1004] * 20], of(340))
    assert [len(tail) for tail in kept(prefixes)] == [20, 100, 20]
    assert prefixes.fetch([*document, 1004, 1, 1], 1)[1] == 321
    prefixes.trim_to(n_sequences=1)
    assert prefixes.fetch([*long_answer, 1], 1)[1] == 420
    prefixes.trim_to(n_sequences=0)
    assert prefixes.nbytes == 0


def test_what_cannot_be_cut_goes_by_age_only():
    document, prefixes = list(range(320)), PrefixCache(1 << 30)
    for question in range(1000, 1003):
        prefixes.insert([*document, question], of(321, RotatingKVCache))
    prefixes.insert(document[:-9], of(311))
    prefixes.trim_to(n_sequences=2)
    assert kept(prefixes) == [[1002], []]


def test_what_is_larger_than_all_room_drives_nothing_out(caplog):
    one = of(320)[0].nbytes
    prefixes = PrefixCache(2 * one)
    prefixes.insert(list(range(320)), of(320))
    prefixes.insert(list(range(1000, 2500)), of(1500))
    assert len(prefixes) == 1 and prefixes.fetch(list(range(320)), 1)[1] == 318
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("1,500 tokens are not kept") and "--prefix-bytes" in told


def test_what_memory_has_no_room_for_is_read_from_its_file(demo_llama, tmp_path, caplog):
    model, _ = demo_llama
    prefixes, tokens = PrefixCache(1), list(range(50, 250))
    prefixes.files = PrefixFiles(tmp_path, 1 << 30, model, {})
    caches = make_prompt_cache(model)
    model(mx.array([tokens]), cache=caches)
    prefixes.write(tokens, caches)
    prompt = [*tokens[:160], 9, 9, 9]
    found, n = prefixes.fetch(prompt, 1)
    assert n == 160 and len(prefixes) == 0 and not caplog.records  # it is kept, in the file
    after = model(mx.array([prompt[n:]]), cache=found)[:, -1]
    assert mx.allclose(after, model(mx.array([prompt]))[:, -1], atol=1e-4)


@pytest.mark.parametrize("memory", ["recall:8bit", "recall:file"])
def test_questions_of_one_document_share_it(demo_llama, memory):
    """Beside another document, in the room of two."""
    (text, facts), (other, _) = (
        make_haystack(demo_llama[1], random.Random(seed), 4, 1500) for seed in (8, 9)
    )
    with serving(memory=memory) as served:
        prefixes = served.engine.prefixes

        def ask(text, question):
            messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
            body = {"messages": messages, "max_tokens": 20}
            found = served.post("/v1/chat/completions", json=body).json()
            known = found["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found["choices"][0]["message"]["content"], known > 1400

        ask(other, "What is it?")
        prefixes._most_bytes = 5 * (prefixes.nbytes + prefixes.file_nbytes) // 2
        for i, fact in enumerate(facts):
            assert ask(text, fact.question) == (fact.value, i > 0)
            assert len(prefixes) == 2
        assert ask(other, "What was it?")[1]
