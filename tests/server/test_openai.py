"""OpenAI's endpoints, asked by OpenAI's own client."""

import concurrent.futures
import random

import openai
import pytest
from server_helpers import POLICY, serving

from mlx_snapkv import Conversation, generate
from mlx_snapkv.demo.questions import make_haystack


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", timeout=60, max_retries=0) as c:
        yield c


@pytest.fixture(scope="module")
def document(demo_llama):
    return make_haystack(demo_llama[1], random.Random(3), 6, 1500)


def chat(client, text, **options):
    given = {"model": "gpt-4o", "messages": [{"role": "user", "content": text}], "max_tokens": 20}
    return client.chat.completions.create(**given | options)


def test_every_question_of_a_document_votes_over_what_the_first_one_read(client, document):
    text, facts = document
    responses = [chat(client, f"{text}\n\n{fact.question}") for fact in facts]
    for fact, response in zip(facts, responses):
        (choice,) = response.choices
        assert choice.message.content == fact.value and choice.finish_reason == "stop"
        assert response.model == "gpt-4o"
        about = response.model_extra["mlx_snapkv"]
        assert about["kv_bytes_after"] < 0.3 * about["kv_bytes_before"]
    known = [r.usage.prompt_tokens_details.cached_tokens for r in responses]
    assert known[0] < 50 or known[0] > 1400  # another test may have asked about it before
    assert all(n > 0.95 * responses[0].usage.prompt_tokens for n in known[1:])
    assert responses[0].usage.total_tokens > responses[0].usage.prompt_tokens > 1400


def test_follow_ups_answer_as_a_conversation(client, document, demo_llama):
    text, facts = document
    conversation = Conversation(*demo_llama, policy=POLICY, memory="recall", max_tokens=20)
    messages = []
    for i, fact in enumerate(facts):
        said = fact.question if i else f"{text}\n\n{fact.question}"
        messages.append({"role": "user", "content": said})
        response = chat(client, "", messages=messages)
        answer = response.choices[0].message.content
        assert answer == "".join(r.text for r in conversation.send(said)).strip() == fact.value
        messages.append({"role": "assistant", "content": answer})
    assert response.usage.prompt_tokens_details.cached_tokens > 1400


def test_a_stream_is_the_whole_answer_in_parts(client, document):
    text, facts = document
    question = f"{text}\n\n{facts[0].question}"
    whole = chat(client, question, logprobs=True, top_logprobs=2)
    options = {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    *chunks, last = list(chat(client, question, stream=True, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == facts[0].value
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    streamed = [
        token for c in chunks if c.choices[0].logprobs for token in c.choices[0].logprobs.content
    ]
    tokens = whole.choices[0].logprobs.content
    assert [t.token for t in streamed] == [t.token for t in tokens]
    assert len(tokens) == whole.usage.completion_tokens
    assert all(len(t.top_logprobs) == 2 and t.logprob <= 0 for t in tokens)
    assert "".join(t.token for t in tokens).strip().startswith(facts[0].value)


def test_four_at_once(client, document):
    text, facts = document

    def ask(fact):
        return chat(client, f"{text}\n\n{fact.question}").choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, facts * 2)) == [fact.value for fact in facts * 2]


def test_completions(client, demo_llama):
    given = {"model": "m", "prompt": "The key of", "max_tokens": 8}
    response = client.completions.create(**given)
    assert response.choices[0].text.strip() == generate(*demo_llama, "The key of", max_tokens=8)
    tokens = demo_llama[1].encode("The key of")
    assert client.completions.create(**given | {"prompt": tokens}).choices == response.choices
    streamed = client.completions.create(**given, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == response.choices[0].text
    # an earlier prompt and its answer as the next prompt
    known = given["prompt"] + response.choices[0].text
    again = client.completions.create(**given | {"prompt": known, "max_tokens": 4})
    assert again.choices[0].text.strip() == generate(*demo_llama, known, max_tokens=4)


def test_several_answers_seeds_and_stop_texts(client):
    given = {"model": "m", "prompt": "The key of", "max_tokens": 12, "temperature": 1.0, "seed": 5}
    first, second = (client.completions.create(**given, n=3) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices] and len(set(texts)) > 1
    assert first.choices[2].index == 2 and first.usage.completion_tokens > 12
    greedy = given | {"temperature": 0}
    text = client.completions.create(**greedy).choices[0].text
    stop = text.split()[2]
    stopped = client.completions.create(**greedy, stop=[stop]).choices[0]
    assert stopped.text == text[: text.index(stop)] and stopped.finish_reason == "stop"
    assert client.completions.create(**greedy).choices[0].finish_reason == "length"


def test_models(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("org/other-name").id == "org/other-name"


def test_a_short_prompt_goes_on_from_quantised_entries():
    """Below the gate it decodes with others, in mlx-lm's batches, which hold plain entries only."""
    fact, filler = "The access code of the opal oak is 481516.", " The door is open."
    question = "\n\nWhat is the access code of the opal oak?"
    with serving(memory="recall:file:4bit") as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
        long, short = (chat(client, f"{fact}{filler * n}{question}") for n in (80, 20))
        kept, all_of_it = (each.model_extra["mlx_snapkv"] for each in (long, short))
        assert kept["entries"] and not all_of_it["entries"]
        entry = kept["kv_bytes_before"] // long.usage.prompt_tokens
        held = entry * short.usage.total_tokens
        assert all_of_it["kv_bytes_before"] == all_of_it["kv_bytes_after"]
        assert all_of_it["kv_bytes_after"] == pytest.approx(held, rel=0.03)
        assert short.usage.prompt_tokens_details.cached_tokens > 50
        assert {each.choices[0].message.content for each in (long, short)} == {"481516"}


def test_mistakes_are_the_clients_own_exceptions(client):
    with pytest.raises(openai.BadRequestError, match="temperature should be") as caught:
        chat(client, "hi", temperature=-1)
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="no GET /v1/files"):
        client.files.list()


@pytest.mark.parametrize("policy", [POLICY, None])
def test_without_a_memory(policy, document):
    text, facts = document
    with serving(policy=policy, memory="drop") as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
        messages = [{"role": "user", "content": f"{text}\n\n{facts[0].question}"}]
        first = chat(client, "", messages=messages)
        assert first.choices[0].message.content == facts[0].value
        # exactly its own continuation goes on from it, compressed or not
        messages += [{"role": "assistant", "content": facts[0].value}]
        messages += [{"role": "user", "content": facts[1].question}]
        second = chat(client, "", messages=messages)
        assert second.usage.prompt_tokens_details.cached_tokens > 1400
        # and a prompt that only begins alike never gets compressed entries
        other = chat(client, f"{text}\n\n{facts[2].question}")
        assert other.choices[0].message.content == facts[2].value
        n_known = other.usage.prompt_tokens_details.cached_tokens
        assert (n_known == 0) == (policy is not None)
