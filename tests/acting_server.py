"""A server for tests of reasoning and tool calls, whose built-in model says what the last message tells it to."""

import contextlib
import itertools
import json

import mlx.core as mx
from agent_templates import FAMILIES
from mlx_lm.tool_parsers import json_tools
from server_helpers import load_named, serving

CHAT, TEXT, MESSAGES, RESPONSES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")
)
SAY = "SAY: "
TEMPLATE = """{{ bos_token }}{% for t in tools or [] %}[{{ t.function.name }}] {% endfor %}{% for m in messages -%}
<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}<|assistant|>{% if enable_thinking == false %}<think></think>{% endif %}"""


def obeying(tokens):
    """Return a logits processor that forces the given tokens, one per step."""
    left = iter(tokens)
    return lambda _, logits: mx.where(mx.arange(logits.shape[-1]) == next(left), logits, -mx.inf)


def _adapt(model, tokenizer):
    tokenizer._tokenizer.chat_template = TEMPLATE
    tokenizer._tool_parser = json_tools.parse_tool_call
    tokenizer._tool_call_start, tokenizer._tool_call_end = "<tool_call>", "</tool_call>"
    tokenizer._think_start, tokenizer._think_end = "<think>", "</think>"
    tokenizer._think_start_tokens, tokenizer._think_end_tokens = (
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("<think>", "</think>")
    )


def asked_for(prompt):
    """Return the text after "SAY: " in the last message, or None if the last message has none."""
    _, order, text = prompt.removesuffix("<|assistant|>").rpartition(SAY)
    return text if order and "<|" not in text else None  # "<|" begins a later message


@contextlib.contextmanager
def acting(say=asked_for, **settings):
    """Yield a server, as `serving` does, whose model answers with `say(prompt)`, or freely if that is None.

    The yielded server's `prompts` lists (prompt tokens, cached tokens) for each request.
    """
    with serving(load_named("demo", _adapt), **settings) as served:
        served.prompts = _make_obey(served.engine, say)
        yield served


def _make_obey(engine, say):
    tokenizer, insert = engine.loaded.tokenizer, engine.batch.generator.insert_segments
    seen = []

    def inserted(prompts, *args, all_tokens, logits_processors, **kwargs):
        tokens = [*all_tokens[0], *itertools.chain(*prompts[0])]
        seen.append((len(tokens), len(all_tokens[0])))
        text = say(tokenizer.decode(tokens))
        if text is not None:
            tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            logits_processors = [[*logits_processors[0], obeying(tokens)]]
        options = {"all_tokens": all_tokens, "logits_processors": logits_processors, **kwargs}
        return insert(prompts, *args, **options)

    engine.batch.generator.insert_segments = inserted
    return seen


class Agent:
    """A server whose model gives the answer that a test sets. It records each prompt."""

    def __init__(self, served, answers):
        self.served, self.answers, self.post = served, answers, served.post
        self.tokenizer = served.engine.loaded.tokenizer

    @contextlib.contextmanager
    def family(self, name):
        hf = self.tokenizer._tokenizer
        usual, hf.chat_template = hf.chat_template, FAMILIES.get(name, hf.chat_template)
        try:
            yield self
        finally:
            hf.chat_template = usual

    def ask(self, path, family="chatml", answer="Fine.", **body):
        """Post a request. Return the prompt that the model read, and the response body."""
        self.answers["next"] = answer
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        with self.family(family):
            found = self.post(path, content=json.dumps({limit: 300} | body))
        assert found.status_code == 200, found.text
        return self.answers["prompt"], found.json()


@contextlib.contextmanager
def answering():
    """Yield an `Agent` on a running server."""
    answers = {"next": "Fine."}

    def say(prompt):
        answers["prompt"] = prompt
        return answers["next"]

    with acting(say) as served:
        yield Agent(served, answers)
