"""Follow-up questions to a server use the entries of earlier prompts, kept in memory or in files."""

import concurrent.futures

import pytest
from disk_helpers import full_disk
from server_helpers import POLICY, ask, load_named, serving, talk

from mlx_snapkv import Conversation, Sparse

SPARSE = Sparse(budget=256, store="file")


def assert_follow_ups_at_once(served, said, facts):
    """Ask for all facts at the same time after one conversation. Assert correct answers, all from cached prefixes."""

    def follow_up(fact):
        return ask(served, talk(*said, fact.question))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(follow_up, facts))
    for fact, (answer, cached, _) in zip(facts, answers):
        assert answer == fact.value and cached > 1400


def test_follow_ups_equal_a_conversations_answers_and_four_may_come_at_once(document, demo_llama):
    text, facts = document
    conversation = Conversation(*demo_llama, sparse=SPARSE, max_tokens=16)
    with serving(policy=SPARSE) as served:
        said = []
        for i, fact in enumerate(facts[:3]):
            said.append(fact.question if i else f"{text}\n\n{fact.question}")
            answer, cached, _ = ask(served, talk(*said))
            sent = "".join(response.text for response in conversation.send(said[-1]))
            assert answer == sent.strip() == fact.value and (cached > 1400) == (i > 0)
            said.append(answer)
        assert_follow_ups_at_once(served, said, facts[2:])
        assert served.metric('mlx_snapkv_kv_bytes{kind="prefix_files"}') > 0


def test_with_a_policy_follow_ups_choose_among_all_entries(document):
    """A prefix has all entries, and each request compresses a copy, so it keeps what a first request would keep."""
    text, facts = document
    with serving(policy=POLICY) as served:
        said = []
        for i, fact in enumerate(facts[:3]):
            said.append(fact.question if i else f"{text}\n\n{fact.question}")
            answer, cached, found = ask(served, talk(*said), logprobs=True)
            served_alone = found["choices"][0]["logprobs"]["content"]
            assert answer == fact.value and (cached > 1400) == (i > 0)
            said.append(answer)
        kept = served.metric('mlx_snapkv_kv_bytes{kind="prefixes"}')
        assert kept > 3 * found["mlx_snapkv"]["kv_bytes_after"]
        assert_follow_ups_at_once(served, said, facts[2:])
        served.engine.loaded.prefixes.trim_to(0)
        answer, cached, again = ask(served, talk(*said[:-1]), logprobs=True)
        assert (answer, cached) == (said[-1], 0)
        read = [token["logprob"] for token in again["choices"][0]["logprobs"]["content"]]
        assert read == pytest.approx([token["logprob"] for token in served_alone], abs=1e-3)


def test_a_system_prompt_is_read_once(document):
    """Linear layers' caches can't be trimmed, and the tokens of all voting queries must be read even when known."""
    text, facts = document
    system = {"role": "system", "content": text[: len(text) // 2]}
    questions = [facts[0].question, facts[1].question, "Why?", facts[0].question]
    prompts = [[system, *talk(question)] for question in questions]

    def told(messages):
        _, cached, found = ask(served, messages, logprobs=True)
        tokens = found["choices"][0]["logprobs"]["content"]
        return cached, found["mlx_snapkv"]["entries"], [token["logprob"] for token in tokens]

    with serving(load_named("demo-qwen3-next"), policy=POLICY) as served:
        known = [told(prompt) for prompt in prompts]
        assert known[0][0] == 0 and min(cached for cached, *_ in known[1:]) > 650
        said = talk(questions[1], ask(served, prompts[1])[0], facts[4].question)
        _, cached, _ = ask(served, [system, *said])
        # The tokens of all voting queries are read again; here they are more than one turn.
        assert cached >= max(n for n, *_ in known)
        # The last prompt equals the first.
        for prompt, (_, entries, logprobs) in zip(prompts[1:], known[1:]):
            served.engine.loaded.prefixes.trim_to(0)
            cached, n_entries, found = told(prompt)
            assert (cached, n_entries) == (0, entries)
            assert found == pytest.approx(logprobs, abs=1e-3)


def test_a_full_disk_is_a_server_error_with_one_line_in_the_log(caplog):
    body = {"messages": talk("The oak is quick. " * 200), "max_tokens": 4}
    with serving(policy=SPARSE) as served:
        with full_disk(100_000):
            found = served.post("/v1/chat/completions", json=body)
        assert found.status_code == 500
        (told,) = [m for m in caplog.messages if "can't be kept in a file" in m]
        assert told.split()[1] == found.headers["x-request-id"]
        assert told.split()[1] in found.json()["error"]["message"]
        assert "Traceback" not in caplog.text
        assert served.post("/v1/chat/completions", json=body).status_code == 200
