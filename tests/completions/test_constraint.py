"""Constrained answers follow a JSON schema or are a forced call, whatever the model prefers."""

import json
import random

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from mlx_lm.tool_parsers import json_tools, mistral, pythonic
from real_models import MODELS, real_folder
from transformers import AutoTokenizer

from mlx_snapkv import SnapKVError, stream_generate
from mlx_snapkv.completions.answer import Completion
from mlx_snapkv.completions.answer_parser import AnswerParser
from mlx_snapkv.completions.body import CHAT, Defaults, parse_body
from mlx_snapkv.completions.constraint import Constraint
from mlx_snapkv.completions.grammar import json_format
from mlx_snapkv.completions.request import completion_request
from mlx_snapkv.demo import MODELS as BUILT_IN
from mlx_snapkv.demo.questions import make_haystack

DOOR = {"type": "object", "properties": {"door": {"enum": ["green", "red"]}}, "required": ["door"]}
TREE = {
    "$defs": {"tree": {"properties": {"left": {"$ref": "#/$defs/tree"}}, "required": []}},
    "$ref": "#/$defs/tree",
    "type": "object",
}
# Schemas, each with a function that tells whether a value obeys.
SCHEMAS = {
    "anything": (True, lambda value: True),
    "an object": ({"type": "object"}, lambda value: isinstance(value, dict)),
    "a whole number": (
        {"type": "integer", "minimum": 12, "maximum": 40},
        range(12, 41).__contains__,
    ),
    "a choice": ({"enum": ["a", 5, None, {"b": [1]}]}, ["a", 5, None, {"b": [1]}].__contains__),
    "required properties": (
        {"properties": {"a": {"type": "string"}, "b": {"type": "boolean"}}, "required": ["b", "a"]}
        | {"type": "object", "additionalProperties": False},
        lambda value: value.keys() == {"a", "b"} and isinstance(value["b"], bool),
    ),
    "a list": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3.0},
        lambda value: 2 <= len(value) <= 3 and all(isinstance(item, int) for item in value),
    ),
    "places in a list": (
        {"prefixItems": [{"type": "null"}, {"const": "x"}], "items": False, "minItems": 2}
        | {"type": "array"},
        [None, "x"].__eq__,
    ),
    "a pattern": (
        {"type": "string", "pattern": "^[a-c]{3}-[0-9]+$", "maxLength": 8},
        lambda value: set(value[:3]) <= set("abc") and value[3] == "-" and value[4:].isdigit(),
    ),
    "a format": ({"type": "string", "format": "date"}, lambda value: len(value.split("-")) == 3),
    "a format that annotates": (
        {"type": "array", "items": {"format": "x-ours", "type": "null"}, "minItems": 1},
        lambda value: {None} == set(value),
    ),
    "keywords that demand nothing": (
        {
            "type": "object",
            "propertyNames": {"type": "string"},
            "required": ["uniqueItems", "format"],
        }
        | {"properties": {"uniqueItems": {"type": "null"}, "format": {"const": {"format": "x"}}}}
        | {"uniqueItems": False, "unevaluatedProperties": {}, "additionalProperties": False},
        {"uniqueItems": None, "format": {"format": "x"}}.__eq__,
    ),
    "one of two": (
        {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "boolean"}}]},
        lambda value: isinstance(value, bool | list),
    ),
    "a reference to itself": (TREE, lambda value: isinstance(value, dict)),
}


def answer(loaded, schema, max_tokens, prompt="The key of", **options):
    """Return an answer's text, its number of tokens, and its constraint."""
    model, tokenizer = loaded
    constraint = Constraint(
        tokenizer, json_format(schema, tokenizer, None, "the schema"), max_tokens
    )
    options |= {"max_tokens": max_tokens, "logits_processors": [constraint]}
    *_, last = texts = list(stream_generate(model, tokenizer, tokenizer.encode(prompt), **options))
    return "".join(r.text for r in texts), last.generation_tokens, constraint


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_obeys_the_schema(demo_llama, name):
    schema, obeys = SCHEMAS[name]
    text, _, _ = answer(demo_llama, schema, 60)
    assert obeys(json.loads(text)), text


@pytest.mark.parametrize("max_tokens", [20, 21, 40, 80])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 1},  # this model never stops opening lists
        {"type": "array", "items": {"type": "string", "minLength": 2}, "minItems": 1},
        {"type": "object", "additionalProperties": DOOR, "minProperties": 1},
    ],
)
def test_json_that_reaches_the_limit_is_closed(demo_llama, schema, max_tokens):
    text, n, constraint = answer(demo_llama, schema, max_tokens)
    json.loads(text)
    assert constraint.closed_early and max_tokens - 12 <= n <= max_tokens


def record(**properties):
    """Return the schema of an object that must have exactly these properties."""
    names = list(properties)
    closed = {"required": names, "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


NODE = {"$ref": "#/$defs/node"}
# Schemas of values within themselves, in which one token may demand many more.
RECURSIVE = {
    "a list of children": record(v={"type": "integer"}, kids={"type": "array", "items": NODE}),
    "many children or null": record(
        v={"type": "integer"},
        kids={"anyOf": [{"type": "array", "items": NODE, "minItems": 30}, {"type": "null"}]},
    ),
    "a child or null": record(v={"type": "boolean"}, next={"anyOf": [NODE, {"type": "null"}]}),
    "a leaf or a node": {
        "anyOf": [
            record(kind={"const": "node"}, left=NODE, right=NODE),
            record(kind={"const": "leaf"}),
        ]
    },
}
LENGTHS = [20, 24, 28, 30, 35, 40, 45, 50, 55, 60, 70, 80, 90, 100, 110, 120, 150]


@pytest.mark.parametrize("name", RECURSIVE)
def test_a_recursive_schema_is_closed_at_every_length(demo_llama, name):
    tokenizer = demo_llama[1]
    schema = {"$defs": {"node": RECURSIVE[name]}, **NODE}
    answer_format = json_format(schema, tokenizer, None, "the schema")
    # What follows "[{" and 'n"' makes the value deeper, and blanks make it longer.
    deeper = tokenizer.encode('[{"kidsnoxev: ,01', add_special_tokens=False)
    bias = mx.zeros(len(tokenizer)).at[mx.array(deeper)].add(8)
    # Where a part is repeated, the model may begin it long before the limit.
    lengths = [*LENGTHS, 900] if "minItems" in str(schema) else LENGTHS
    for max_tokens in lengths:
        constraint, tokens = Constraint(tokenizer, answer_format, max_tokens), [5, 6]
        for step in range(max_tokens):
            noise = 3 * mx.random.gumbel(bias.shape, key=mx.random.key(1000 * max_tokens + step))
            token = constraint(mx.array(tokens), (bias + noise)[None])[0].argmax().item()
            if token == tokenizer.eos_token_id:
                break
            tokens.append(token)
        text = tokenizer.decode(tokens[2:])
        assert json.loads(text), (max_tokens, text)


def test_an_answer_that_is_cut_has_the_reason_length(demo_llama):
    for schema, reason in ((True, "length"), (DOOR, "stop")):
        body = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        # A bias makes the model prefer "[", so that it never stops opening lists.
        likes = (
            {str(demo_llama[1].encode("[", add_special_tokens=False)[0]): 100}
            if schema is True
            else {}
        )
        (found,) = answers(demo_llama, max_tokens=40, logit_bias=likes, **body)
        assert found.finish_reason == reason and json.loads(found.reply.text)


def answers(loaded, n=1, **body):
    """Yield the completions of a chat request, decoded by mlx-lm's own loop."""
    model, tokenizer = loaded
    body |= {"messages": [{"role": "user", "content": "open the door"}]}
    for _ in range(n):
        asked = completion_request(
            parse_body(CHAT, dict(body)), tokenizer, Defaults(max_tokens=120)
        )
        found = Completion(asked, tokenizer)
        options = {"max_tokens": asked.max_tokens, "logits_processors": asked.processors}
        for r in stream_generate(model, tokenizer, asked.prompt, **options):
            found.add(r.token, r.finish_reason)
        yield found


TEMPLATE = "{% for t in tools or [] %}{{ t.function.name if t.function }} {% endfor %}{{ messages[0].content }}\n"
# For each format: the parser, an addition to the template, and the beginning of a forced call.
CALLS = {
    "json": (json_tools, "", '<tool_call>{"name": "open", "arguments": '),
    "mistral": (mistral, "", '[TOOL_CALLS][{"name": "open", "arguments": '),
    "mistral's header": (mistral, "{# [ARGS] #}", "[TOOL_CALLS]open[ARGS]"),
    "another": (pythonic, "", '{"name": "open", "arguments": '),
}


def calling(parser, template=TEMPLATE):
    """Return the built-in tokenizer, set up for a model whose calls `parser` can read."""
    tokenizer = load(BUILT_IN["demo"])
    tokenizer.chat_template = template
    tokenizer._tool_parser = parser.parse_tool_call
    tokenizer._tool_call_start = parser.tool_call_start
    tokenizer._tool_call_end = parser.tool_call_end
    return tokenizer


def tool(name, parameters=None):
    about = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **about}}


ODD_PARAMETERS = [
    {"type": "object", "properties": None, "required": None, "description": None},
    {"properties": {"door": {"type": "boolean", "enum": None}}, "required": ["door", "at"]},
]


@pytest.mark.parametrize("parameters", ODD_PARAMETERS)
def test_parameters_of_a_tool_may_have_nulls_and_missing_properties(demo_llama, parameters):
    tokenizer = calling(json_tools)
    tools = [tool("\u6253\u5f00", parameters)]
    (found,) = answers(
        (demo_llama[0], tokenizer), tools=tools, tool_choice="required", max_tokens=30
    )
    assert '{"name": "\u6253\u5f00"' in found.reply.text  # max_tokens cuts the call


@pytest.mark.parametrize("kind", ["array", "null", ["array", "null"]])
def test_parameters_that_are_no_object_can_not_be_forced(demo_llama, kind):
    tools = [tool("open", {"type": kind})]
    with pytest.raises(SnapKVError, match="the parameters of open must be an object, got"):
        list(answers((demo_llama[0], calling(json_tools)), tools=tools, tool_choice="required"))


@pytest.mark.parametrize("parameters", [{"type": "object"}, {"properties": {}}, None, {}])
def test_a_forced_call_invents_no_arguments(demo_llama, parameters):
    loaded = demo_llama[0], calling(json_tools)
    likes = {str(demo_llama[1].encode('"', add_special_tokens=False)[0]): 100}
    how = {"tool_choice": "required", "logit_bias": likes}
    (found,) = answers(loaded, tools=[tool("now", parameters)], **how)
    assert found.reply.calls[0]["function"]["arguments"] == "{}"


def test_a_forced_call_invents_no_properties_within_its_arguments(demo_llama):
    loaded = demo_llama[0], calling(json_tools)
    place = {"type": "object", "properties": {"x": {"enum": [1]}, "y": {"enum": [2]}}}
    place["required"] = ["x", "y"]
    parts = {
        "at": {"$ref": "#/$defs/Place"},
        "all": {"type": "array", "items": place, "minItems": 1, "maxItems": 1},
    }
    parameters = {"type": "object", "properties": parts, "required": ["at", "all"]}
    likes = {str(demo_llama[1].encode(text, add_special_tokens=False)[0]): 50 for text in "],"}
    how = {"tool_choice": "required", "logit_bias": likes}
    (found,) = answers(loaded, tools=[tool("go", parameters | {"$defs": {"Place": place}})], **how)
    arguments = json.loads(found.reply.calls[0]["function"]["arguments"])
    assert arguments == {"at": {"x": 1, "y": 2}, "all": [{"x": 1, "y": 2}]}


@pytest.mark.parametrize("combined", ["allOf", "anyOf"])
def test_parts_of_an_object_may_name_each_others_properties(demo_llama, combined):
    parts = [{"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}]
    more = {"properties": {"b": {"enum": [2]}}, "required": ["b"]}
    parameters = {
        "type": "object",
        "properties": {"x": {"type": "object", combined: parts, **more}},
    }
    loaded = demo_llama[0], calling(json_tools)
    likes = {str(demo_llama[1].encode(text, add_special_tokens=False)[0]): 50 for text in '"}'}
    how = {"tool_choice": "required", "logit_bias": likes, "max_tokens": 60}
    (found,) = answers(loaded, tools=[tool("go", parameters | {"required": ["x"]})], **how)
    text = found.reply.text + str(found.reply.calls)
    assert '"a"' in text and '"b"' in text


def test_a_limit_below_the_shortest_json_is_refused(demo_llama):
    for schema, max_tokens, n in (
        (DOOR, 3, "11"),
        ({"type": "array", "minItems": 900}, 700, "2701"),
    ):
        with pytest.raises(
            SnapKVError, match=rf"^max_tokens={max_tokens} is too few .* {n} tokens"
        ):
            answer(demo_llama, schema, max_tokens)


@pytest.mark.parametrize("name", CALLS)
def test_a_forced_call_can_be_parsed_in_every_format(demo_llama, name):
    parser, template, start = CALLS[name]
    loaded = demo_llama[0], calling(parser, TEMPLATE + template)
    tools = [tool("shut"), tool("open", DOOR)]
    chosen = {"type": "function", "function": {"name": "open"}}
    (found,) = answers(loaded, tools=tools, tool_choice=chosen)
    (call,) = found.reply.calls
    assert call["function"]["name"] == "open" and found.finish_reason == "tool_calls"
    assert json.loads(call["function"]["arguments"])["door"] in ("green", "red")
    assert found.reply.text.strip() == ""
    (found,) = answers(loaded, tools=tools, tool_choice="required")
    assert [c["function"]["name"] for c in found.reply.calls] in (["open"], ["shut"])
    # A call that is cut off is text, so that no client runs half a call.
    (found,) = answers(loaded, tools=tools, tool_choice=chosen, max_tokens=25)
    assert found.reply.calls == [] and found.finish_reason == "length"
    assert (parser.tool_call_start + found.reply.text).endswith(start[-8:]) or found.reply.text


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("begun", ["", "<think>"])
@pytest.mark.parametrize("max_tokens", [60, 200])
def test_thoughts_are_not_constrained(begun, is_special, max_tokens):
    """The template or the model starts the reasoning. Its markers are single tokens, as in real models, or text."""
    tokenizer = AutoTokenizer.from_pretrained(BUILT_IN["demo"])
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=is_special)
    tokenizer.chat_template = TEMPLATE + begun
    tokenizer = TokenizerWrapper(tokenizer, eos_token_ids=[tokenizer.eos_token_id])
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": max_tokens}
    asked = completion_request(
        parse_body(CHAT, body | {"response_format": {"type": "json_object"}}), tokenizer, Defaults()
    )
    assert asked.initial_state == ("reasoning" if begun else "normal")
    thoughts, text = 'It is {"a": "b"} or "no".', '{"door": "red"}'
    said = f"{'' if begun else '<think>'}{thoughts}</think>\n\n{text}"
    found, tokens, logits = Completion(asked, tokenizer), [5, 6], mx.zeros((1, len(tokenizer)))
    for token in tokenizer.encode(said, add_special_tokens=False):
        likes = logits.at[0, token].add(1)
        assert asked.constraint(mx.array(tokens), likes)[0].argmax().item() == token
        tokens.append(token)
        found.add(token, None)
    assert asked.constraint(mx.array(tokens), logits)[0].argmax().item() == tokenizer.eos_token_id
    found.add(tokenizer.eos_token_id, "stop")
    assert (found.reply.reasoning, found.reply.text) == (thoughts, "\n\n" + text)
    assert found.finish_reason == "stop"


def test_constrained_json_may_contain_the_marks_of_calls(demo_llama):
    tokenizer = calling(json_tools)
    said = '{"a": "<tool_call>{}</tool_call>"}'
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_object"},
    }
    # The whole text may also come at once.
    parser = AnswerParser(
        completion_request(parse_body(CHAT, body), tokenizer, Defaults()), tokenizer
    )
    assert "".join(part.text for part in parser.parse(said, is_last=True)) == said
    for asked, text in ((body, said), ({**body, "response_format": None}, '{"a": ""}')):
        found = Completion(
            completion_request(parse_body(CHAT, asked), tokenizer, Defaults()), tokenizer
        )
        for token in tokenizer.encode(said, add_special_tokens=False):
            found.add(token, None)
        found.add(tokenizer.eos_token_id, "stop")
        assert (found.reply.text == said) is (text == said)


def test_drafted_tokens_are_constrained(demo_llama):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 6}
    whole = answer(demo_llama, schema, 40)[0]
    drafted = answer(demo_llama, schema, 40, draft_model=demo_llama[0], num_draft_tokens=3)[0]
    assert drafted == whole and 3 <= len(json.loads(whole)) <= 6


@pytest.mark.parametrize("n_drafted", [1, 3])
def test_drafted_tokens_leave_a_closed_answer_as_it_is(demo_llama, n_drafted):
    """Near `max_tokens` the main model's logits decide where JSON is closed, not the draft model's."""
    text, facts = make_haystack(demo_llama[1], random.Random(4), 2, 300)
    asked = {"schema": {"type": "object"}, "prompt": f"{text}\n\n{facts[0].question}"}
    for max_tokens in (16, 24, 40):
        whole, _, constraint = answer(demo_llama, max_tokens=max_tokens, **asked)
        drafting = {"draft_model": demo_llama[0], "num_draft_tokens": n_drafted}
        drafted = answer(demo_llama, max_tokens=max_tokens, **asked, **drafting)[0]
        assert drafted == whole and constraint.closed_early and isinstance(json.loads(whole), dict)


def test_an_answer_from_compressed_entries_obeys_the_schema(demo_llama):
    prompt = "It was cold at the market. " * 60 + "The key of"
    text, _, _ = answer(demo_llama, DOOR, 40, prompt, snapkv="top_k=24,n_sink=4,n_window=8")
    assert json.loads(text)["door"] in ("green", "red")


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_real_tokenizers_are_constrained(name):
    """Valid text is allowed token by token, as the tokenizer splits it. After it, only the end is allowed."""
    tokenizer = load(real_folder(name))
    schema = {"type": "object", "properties": {"a b": {"type": "string"}}, "required": ["a b"]}
    answer_format = json_format(
        schema | {"additionalProperties": False}, tokenizer, None, "the schema"
    )
    constraint, size = Constraint(tokenizer, answer_format), len(tokenizer) + 7
    tokens, logits = [5, 6], mx.zeros((1, size))
    for token in tokenizer.encode('{"a b": "é😀 \\n tea"}', add_special_tokens=False):
        masked = constraint(mx.array(tokens), logits)[0]
        assert masked[token].item() == 0 and masked[-1].item() == -mx.inf
        tokens.append(token)
    (last,) = mx.argsort(-constraint(mx.array(tokens), logits)[0])[:1].tolist()
    assert last in tokenizer.eos_token_ids
    assert constraint(mx.array(tokens), logits)[0].max(keepdims=True).item() == 0


@pytest.mark.parametrize(
    "schema, words",
    [
        (False, "Unsatisfiable schema"),
        ({"uniqueItems": True}, 'unsupported keywords: ["uniqueItems"]'),
        ({"type": "thing"}, "Invalid type: thing"),
        ({"pattern": "(?=a)"}, "look-around"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 2}]}, "use anyOf"),
        ({"$ref": "https://example.com/x"}, "example.com"),
        ({"$ref": "#/$defs/x"}, "does not exist"),
    ],
)
def test_a_schema_that_cant_be_enforced_is_one_sentence(demo_llama, schema, words):
    with pytest.raises(SnapKVError, match=r"^the schema can't be enforced: ") as error:
        json_format(schema, demo_llama[1], None, "the schema")
    assert words in str(error.value) and "\n" not in str(error.value)
    tokenizer = calling(json_tools)
    tools = [tool("shut"), tool("open", {"properties": {"x": schema}, "required": ["x"]})]
    with pytest.raises(SnapKVError, match=r"^the parameters of the tool 'open' can't be enforced"):
        list(answers((demo_llama[0], tokenizer), tools=tools, tool_choice="required"))


def test_impossible_forced_calls_are_refused(demo_llama):
    loaded = demo_llama[0], calling(json_tools)
    odd = [tool("open", {"properties": {"x": {}}, "required": [{"x": 1}]})]
    with pytest.raises(SnapKVError, match=r"^the parameters of the tool 'open' can't be enforced"):
        list(answers(loaded, tools=odd, tool_choice="required"))
    with pytest.raises(SnapKVError, match="there are no tools"):
        list(answers(loaded, tool_choice="required"))
    with pytest.raises(SnapKVError, match="asks for 'shut', which is none of the tools"):
        chosen = {"type": "function", "function": {"name": "shut"}}
        list(answers(loaded, tools=[tool("open")], tool_choice=chosen))
    with pytest.raises(SnapKVError, match="have a function with a name"):
        list(answers(loaded, tools=[{"type": "function"}], tool_choice="required"))


def obj(n, name="p", **more):
    """Return the schema of an object with `n` properties, which are optional unless `more` makes them required."""
    properties = {f"{name}{i}": {"type": "boolean"} for i in range(n)}
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def test_the_number_of_optional_properties_is_limited(demo_llama):
    names = list(obj(3000)["properties"])
    text, _, _ = answer(demo_llama, obj(1000), 40)
    assert json.loads(text).keys() <= set(names[:1000])
    json_format(obj(3000, required=names[1:]), demo_llama[1], None, "the schema")
    deep = {"type": "array", "items": {"anyOf": [{"type": "null"}, obj(1001)]}}
    with pytest.raises(SnapKVError, match=r"^the schema can't be enforced: an object has 1001 opt"):
        json_format(deep, demo_llama[1], None, "the schema")
    # Two alternatives together are too large, which is known only when the answer reaches them.
    together = {"anyOf": [obj(900), obj(900, "q")]}
    with pytest.raises(SnapKVError, match=r"^the answer's schema is too complex .* max is 5000$"):
        answer(demo_llama, together, 12)


def test_tools_too_large_to_be_enforced_together_are_called_by_their_names(demo_llama):
    loaded = demo_llama[0], calling(json_tools)
    tools = [tool(f"open_{n}", obj(90)) for n in range(120)]
    (found,) = answers(loaded, tools=tools, tool_choice="required", max_tokens=20)
    assert found.request.warnings == [
        "the tools' parameters are left out: together they are too large to be enforced"
    ]
    assert found.reply.text.lstrip().startswith('{"name": "open_')  # max_tokens cuts the call
