"""A server whose model thinks and calls tools: the embedded one, made to say what the last message asks for."""

from dataclasses import replace

import mlx.core as mx
from mlx_lm.tool_parsers import json_tools
from server_helpers import load_named, serving

SAY = "SAY: "
TEMPLATE = """{{ bos_token }}{% for t in tools or [] %}[{{ t.function.name }}] {% endfor %}{% for m in messages -%}
<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}<|assistant|>{% if enable_thinking == false %}<think></think>{% endif %}"""


class Obeying:
    """A logits processor that leaves one token possible at every step."""

    def __init__(self, tokens):
        self._tokens = iter(tokens)

    def __call__(self, tokens, logits):
        allowed = mx.arange(logits.shape[-1]) == next(self._tokens)
        return mx.where(allowed, logits, -mx.inf)


def _adapt(model, tokenizer):
    tokenizer._tokenizer.chat_template = TEMPLATE
    tokenizer._tool_parser = json_tools.parse_tool_call
    tokenizer._tool_call_start, tokenizer._tool_call_end = "<tool_call>", "</tool_call>"
    tokenizer._think_start, tokenizer._think_end = "<think>", "</think>"
    tokenizer._think_start_tokens, tokenizer._think_end_tokens = (
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("<think>", "</think>")
    )


def acting():
    """As `serving`; the model obeys once `obey` has been called with the engine."""
    return serving(load_named("demo", _adapt))


def obey(engine):
    start = engine._start

    def started(channel, body, wanted):
        tokenizer = engine.loaded.tokenizer
        _, order, text = body.messages[-1].content.partition(SAY)
        if order:
            tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            processors = [*wanted.processors, Obeying(tokens)]
            wanted = replace(wanted, processors=processors)
        start(channel, body, wanted)

    engine._start = started
