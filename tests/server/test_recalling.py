"""A server that forgets nothing: verified answers, entries in files, books, and models that take nothing back."""

import concurrent.futures
import inspect
import os
import random

import pytest
from disk_helpers import full_disk
from mlx_lm.models.cache import LRUPromptCache
from server_helpers import POLICY, load_named, serving

from mlx_snapkv import Conversation
from mlx_snapkv.demo.questions import make_haystack
from mlx_snapkv.server import prefix_cache

SMALL = (
    POLICY.replace("25%", "96").replace("n_window=32", "n_window=40").replace("ahead=4", "ahead=0")
)
BOOK = "keydiff:budget=256,block=128,min_ctx=256 then snapkv:budget=128,n_sink=4,n_window=32"
WAYS = [
    (SMALL, "recall:8bit", {"verify": "all"}),
    (SMALL, "recall:file", {}),
    (BOOK, "recall:file:8bit", {}),
]


@pytest.fixture(scope="module")
def document(demo_llama):
    return make_haystack(demo_llama[1], random.Random(5), 6, 800)


def ask(served, messages, **fields):
    body = {"messages": messages, "max_tokens": 16, **fields}
    found = served.post("/v1/chat/completions", json=body).json()
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["message"]["content"], cached, found["mlx_snapkv"]


@pytest.mark.parametrize(("policy", "memory", "options"), WAYS, ids=lambda value: str(value)[:12])
def test_follow_ups_answer_as_a_conversation_and_four_at_once(
    document, demo_llama, policy, memory, options
):
    text, facts = document
    conversation = Conversation(*demo_llama, policy=policy, memory=memory, max_tokens=16, **options)
    with serving(policy=policy, memory=memory, generation=options) as served:
        messages = []
        for i, fact in enumerate(facts[:3]):
            said = fact.question if i else f"{text}\n\n{fact.question}"
            messages.append({"role": "user", "content": said})
            answer, cached, about = ask(served, messages)
            assert answer == "".join(r.text for r in conversation.send(said)).strip() == fact.value
            assert (cached > 700) == (i > 0)
            assert ("verified" in about) == ("verify" in options)
            assert ("book" in about) == (policy == BOOK)
            messages.append({"role": "assistant", "content": answer})

        def follow_up(fact):
            return ask(served, [*messages, {"role": "user", "content": fact.question}])

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(follow_up, facts[2:]))
        for fact, (answer, cached, _) in zip(facts[2:], answers):
            assert answer == fact.value and cached > 700
        files = served.metric('mlx_snapkv_kv_bytes{kind="prefix_files"}')
        assert (files > 0) == ("file" in memory)


@pytest.mark.parametrize(("policy", "memory"), [(POLICY, "recall:file"), (POLICY, "drop")])
def test_a_system_prompt_is_read_once(document, policy, memory):
    """Also of a model with linear layers, whose caches can't be cut, and where only compressed ones are left."""
    text, facts = document
    system = {"role": "system", "content": text}
    with serving(load_named("demo-qwen3-next"), policy=policy, memory=memory) as served:
        found = [ask(served, [system, {"role": "user", "content": f.question}]) for f in facts[:3]]
        known = [cached for _, cached, _ in found]
        assert known[0] == 0 and min(known[1:]) > 750
        last = {"role": "user", "content": facts[4].question}
        said = [{"role": "user", "content": facts[2].question}]
        said += [{"role": "assistant", "content": found[2][0]}]
        _, cached, _ = ask(served, [system, *said, last])
        # As many as vote are read again, which are more than a turn's tokens here.
        assert cached >= max(known) + (memory == "drop")
    with serving(load_named("demo-qwen3-next"), policy=policy, memory=memory) as served:
        for fact, (wanted, _, about) in zip(facts[1:3], found[1:]):
            given = [
                {"role": "system", "content": text},
                {"role": "user", "content": fact.question},
            ]
            served.engine.prefixes.trim_to(n_sequences=0)
            anew, cached, again = ask(served, given)
            assert cached == 0 and anew == wanted and again["entries"] == about["entries"]


def test_as_many_vote_of_a_known_prompt_as_of_a_new_one(document):
    """Also where caches can't be cut, of the same prompt once more, and of a short question about what is known."""
    text, facts = document
    system = {"role": "system", "content": text}
    prompts = [[system, {"role": "user", "content": said}] for said in (facts[0].question, "Why?")]
    prompts.append(prompts[0])

    def told(served, messages):
        body = {"messages": messages, "max_tokens": 16, "logprobs": True}
        found = served.post("/v1/chat/completions", json=body).json()
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, [token["logprob"] for token in found["choices"][0]["logprobs"]["content"]]

    with serving(load_named("demo-qwen3-next"), policy=POLICY, memory="recall:file") as served:
        known = [told(served, prompt) for prompt in prompts]
        assert known[0][0] == 0 and min(cached for cached, _ in known[1:]) > 700
        for prompt, (_, wanted) in zip(prompts, known):
            served.engine.prefixes.trim_to(n_sequences=0)
            cached, anew = told(served, prompt)
            assert cached == 0 and anew == pytest.approx(wanted, abs=1e-3)


def test_what_is_read_again_as_a_whole_is_read_anew(document):
    """Of a prompt whose beginning was known, kvzip could repeat but the rest."""
    text, facts = document
    system = {"role": "system", "content": text}
    with serving(policy="kvzip:budget=50%,min_ctx=256", memory="drop") as served:
        for fact in facts[:2]:
            question = {"role": "user", "content": fact.question}
            answer, cached, about = ask(served, [system, question])
            assert answer == fact.value and cached == 0
            assert about["reason"] is None
        assert served.metric('mlx_snapkv_kv_bytes{kind="prefixes"}') == 0


def test_room_for_prefixes_counts_files(document):
    text, facts = document
    with serving(policy=POLICY, memory="recall:file") as served:
        prefixes = served.engine.prefixes
        messages = [{"role": "user", "content": f"{text}\n\n{facts[0].question}"}]
        ask(served, messages)
        one = prefixes.file_nbytes
        prefixes._most_bytes = 2 * one + one // 2
        for n in range(3):
            messages[0]["content"] = f"{n} {text}\n\n{facts[0].question}"
            assert ask(served, messages)[0] == facts[0].value
            assert prefixes.file_nbytes <= prefixes._most_bytes
        assert len(prefixes) == 2


def test_the_hooks_of_mlx_lm_that_prefixes_stand_on():
    """An upgrade of mlx-lm that changes one of these is to fail here, and not in an answer."""
    store = LRUPromptCache(3)
    store.insert_cache("m", [1, 2], [])
    keys = [key for least_recent in store._lru._lrus.values() for key in least_recent]
    assert keys == [("m", [1, 2])]
    assert store._trie.get(*keys[0]).prompt_cache == []
    entry = store._trie.pop(*keys[0])
    store._lru.remove(*keys[0])
    assert len(store) == 0 and entry.nbytes == store._n_bytes == 0
    assert store._n_bytes_by_type[entry.cache_type] == 0
    assert {"n_sequences", "n_bytes"} <= set(inspect.signature(store.trim_to).parameters)


def test_prompts_in_files_leave_files_for_connections(monkeypatch):
    """Every prompt kept has open files in every layer; the oldest go before there are too many."""
    most, before = 200, len(os.listdir("/dev/fd"))
    monkeypatch.setattr(prefix_cache.resource, "getrlimit", lambda kind: (2 * (before + most), -1))
    with serving(policy=POLICY, memory="recall:file") as served:
        for n in range(45):
            body = {"prompt": f"{n} word " * 110, "max_tokens": 1}
            assert served.post("/v1/completions", json=body).status_code == 200
        assert most / 2 < len(os.listdir("/dev/fd")) - before < most + 30
        again = served.post("/v1/completions", json=body).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 300


def test_a_full_disk_is_no_mistake_of_the_client(caplog):
    """It gets a number, under which the log says why; when there is room again, it is answered."""
    body = {"messages": [{"role": "user", "content": "The oak is quick. " * 200}], "max_tokens": 4}
    with serving(memory="recall:file") as served:
        with full_disk(100_000):
            found = served.post("/v1/chat/completions", json=body)
        assert found.status_code == 500
        (told,) = [r for r in caplog.records if "can't be kept in a file" in r.getMessage()]
        assert told.getMessage().split()[1] in found.json()["error"]["message"]
        assert told.exc_info is None
        assert served.post("/v1/chat/completions", json=body).status_code == 200
