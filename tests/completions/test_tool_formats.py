"""Every tool parser of mlx-lm with real model output: arguments arrive as the model meant them, or as text."""

import functools
import importlib
import json
import pkgutil

import pytest
from mlx_lm import tool_parsers
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import AutoTokenizer

from mlx_snapkv.completions.answer_parser import AnswerParser
from mlx_snapkv.completions.body import CHAT, Defaults, parse_body
from mlx_snapkv.completions.request import completion_request
from mlx_snapkv.demo import MODELS

TEMPLATE = "{% for t in tools or [] %}{{ t }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
SCHEMA = {
    "type": "object",
    "$defs": {"Count": {"type": "integer"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "boolean"}]}},
    "properties": {
        "text": {"type": "string"},
        "more": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "on": {"type": "boolean"},
        "items": {"type": "array", "items": {}},
        "map": {"type": "object"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"oneOf": [{"type": "number"}, {"type": "boolean"}]},
        "some": {"type": ["string", "null"]},
        "code": {"type": ["string", "number"]},
        "ref": {"$ref": "#/$defs/Count"},
        "loop": {"$ref": "#/$defs/Loop"},
        "level": {"enum": [1, 2]},
        "any": {},
        "odd": {"type": "integer", "anyOf": 5},
    },
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "edit", "parameters": SCHEMA}}


def as_text(value):
    return value if isinstance(value, str) else json.dumps(value)


def tagged(before, argument, after):
    """Return a function that writes calls with tags."""

    def write(name, arguments):
        inner = "".join(argument.format(k=key, v=as_text(arguments[key])) for key in arguments)
        return before.format(name=name) + inner + after

    return write


def as_gemma(quote):
    """Return a function that writes Gemma's calls, with strings between `quote`s."""

    def literal(value):
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{literal(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(literal, value))}]"
        return json.dumps(value)

    return lambda name, arguments: f"call:{name}{literal(arguments)}"


def as_python(name, arguments):
    return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


def as_kimi_k3(name, arguments):
    types = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
    types |= {list: "array", dict: "object"}
    inner = "".join(
        f'<|open|>argument key="{key}" type="{types[type(value)]}"<|sep|>{as_text(value)}<|close|>argument<|sep|>'
        for key, value in arguments.items()
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{inner}<|close|>call<|sep|>'


def as_json(name, arguments):
    return json.dumps({"name": name, "arguments": arguments})


GLM = "<{0}arg_key>{{k}}</{0}arg_key>\n<{0}arg_value>{{v}}</{0}arg_value>\n"
INVOKE = (
    '<{0}invoke name="{{name}}">\n',
    '<{0}parameter name="{{k}}">{{v}}</{0}parameter>\n',
    "</{0}invoke>\n",
)
WRITERS = {
    "function_gemma": as_gemma("<escape>"),
    "gemma4": as_gemma('<|"|>'),
    "glm47": tagged("{name}\n", GLM.format(""), ""),
    "json_tools": as_json,
    "kimi_k2": lambda name, arguments: (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
    ),
    "kimi_k3": as_kimi_k3,
    "laguna": tagged("{name}\n", GLM.format(""), ""),
    "longcat": tagged("{name}\n", GLM.format("longcat_"), ""),
    "minicpm5": tagged('"{name}">', '<param name="{k}">{v}</param>', ""),
    "minimax_m2": tagged(*(part.format("") for part in INVOKE)),
    "mistral": lambda name, arguments: f"{name}[ARGS]{json.dumps(arguments)}",
    "muse_spark": tagged(*(part.format("atem:") for part in INVOKE)),
    "pythonic": as_python,
    "qwen3_coder": tagged("\n<function={name}>\n", "<parameter={k}>\n{v}\n</parameter>\n", "</function>\n"),
}  # fmt: skip
TAGGED = ["glm47", "laguna", "longcat", "minicpm5", "minimax_m2", "muse_spark", "qwen3_coder"]
SEVERAL = [
    "json_tools",
    "kimi_k2",
    "kimi_k3",
    "minimax_m2",
    "mistral",
    "muse_spark",
    "function_gemma",
    "gemma4",
]

MARKERS = [
    "</parameter>", "<parameter=n>", "</function>", "<function=edit>", "</tool_call>", "<tool_call>", "</arg_value>",
    "<arg_key>", "</longcat_arg_value>", "</longcat_tool_call>", "</param>", "</invoke>", "</minimax:tool_call>",
    "</atem:parameter>", "</atem:function_calls>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "}", "{", ")]",
    "[TOOL_CALLS]", "[ARGS]{}", "<|close|>call<|sep|>", "<end_function_call>", "<tool_call|>", '"', "'", "\\n", "\\",
]  # fmt: skip
EXAMPLE = (
    "<tool_call>\n<function=edit>\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>"
)
CASES = {
    "blanks around": {"text": "  a\n b \n"},
    "blanks only": {"text": " \n\t"},
    "line breaks around": {"text": "\n\na\n\n", "more": "\n"},
    "empty": {"text": ""},
    "no arguments": {},
    "letters": {"text": "\u00e9 \U0001f600 &lt;&amp; \u2028"},
    "number in a string": {"text": "5", "more": "007"},
    "constants in strings": {"text": "null", "more": "True"},
    "JSON in a string": {"text": '{"a": [1, "b"]}', "more": '"quoted"'},
    "an example call": {"text": f"So:\n{EXAMPLE}\nDone."},
    "numbers": {"n": 5, "x": 0.5},
    "large number": {"n": 9007199254740993},
    "booleans": {"on": True, "loop": False},
    "list": {"items": [1, "a, b", [None, True], {"c": "d"}]},
    "object": {"map": {"a": {"b": [1.5, " "]}, "c": ""}},
    "null": {"maybe": None, "some": None},
    "union": {"maybe": 3, "either": True, "some": "a"},
    "union with a number": {"either": 2.5, "code": "1.10"},
    "reference": {"ref": 7, "level": 2, "odd": 3},
    "several": {"text": "a", "n": 1, "more": "b"},
    **{
        f"{marker} in a string": {"text": f"a {marker} b", "more": f"{marker} c"}
        for marker in MARKERS
    },
}


@pytest.fixture(scope="module")
def answering():
    """Return a function that parses an answer in a format, and returns its text and its calls."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS["demo"])
    tokenizer.chat_template = TEMPLATE

    @functools.cache
    def asked(name, tool):
        """Return the wrapped tokenizer and the request, which takes longer to make than an answer to parse."""
        module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
        start, end = module.tool_call_start, module.tool_call_end
        wrapper = TokenizerWrapper(
            tokenizer, tool_call_start=start, tool_call_end=end, tool_parser=module.parse_tool_call
        )
        tools = [json.loads(tool)]
        body = parse_body(CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": tools})
        return wrapper, completion_request(body, wrapper, Defaults())

    def answer(name, text, step=None, tool=TOOL):
        wrapper, request = asked(name, json.dumps(tool))
        parser = AnswerParser(request, wrapper)
        start, end = wrapper.tool_call_start, wrapper.tool_call_end
        text = text.replace("START", start).replace("END", end)
        step = step or len(text)
        parts = []
        for at in range(0, len(text), step):
            parts += parser.parse(text[at : at + step], at + step >= len(text))
        calls = [call["function"] for part in parts for call in part.calls]
        return "".join(part.text for part in parts), [
            (call["name"], json.loads(call["arguments"])) for call in calls
        ]

    return answer


def test_every_parser_of_mlx_lm_is_in_the_table():
    assert {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)} == set(WRITERS)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("case", CASES)
def test_a_call_keeps_its_arguments(answering, name, case):
    arguments = CASES[case]
    written = f"So: START{WRITERS[name]('edit', arguments)}END"
    wanted = ("So: ", [("edit", arguments)])
    for step in (None, 1, 7):
        assert answering(name, written, step) == wanted


@pytest.mark.parametrize("name", WRITERS)
def test_two_calls_with_text_between_them(answering, name):
    first, second = (WRITERS[name]("edit", {"text": f"{n} "}) for n in (1, 2))
    wanted = [("edit", {"text": "1 "}), ("edit", {"text": "2 "})]
    for step in (None, 1):
        text, calls = answering(name, f"START{first}END and START{second}END", step)
        assert calls == wanted and (text == " and " or name == "mistral")
        if name in SEVERAL:
            assert answering(name, f"START{first}{second}END", step) == ("", wanted)


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_that_is_cut_is_text(answering, name):
    whole = "START" + WRITERS[name]("edit", {"text": "a </b>", "n": 12, "more": "zzz"})
    for n in range(len("STARTedit"), whole.index("zzz") + 4):
        assert answering(name, whole[:n])[1] == [], whole[:n]


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("key", "written", "wanted"),
    [
        ("n", "2024-05-01", "2024-05-01"),
        ("n", "5.0", 5),
        ("n", "5.5", "5.5"),
        ("n", " 5\n", 5),
        ("n", "null", "null"),
        ("x", "1e400", "1e400"),
        ("x", "NaN", "NaN"),
        ("x", "3", 3),
        ("on", "True", True),
        ("on", "yes", "yes"),
        ("maybe", "None", None),
        ("maybe", "soon", "soon"),
        ("some", "None", "None"),
        ("code", "1.10", "1.10"),
        ("code", "1.5", 1.5),
        ("items", "['a', None]", ["a", None]),
        ("items", "a, b", "a, b"),
        ("map", "[1]", "[1]"),
        ("loop", "7", "7"),
        ("any", '{"a": 1}', '{"a": 1}'),
        ("unknown", "5", "5"),
    ],
)
def test_other_values_are_typed_by_the_schema_or_stay_text(answering, name, key, written, wanted):
    call = f"START{WRITERS[name]('edit', {key: written, 'text': ' '})}END"
    assert answering(name, call) == ("", [("edit", {key: wanted, "text": " "})])


REPAIRED = [
    ("qwen3_coder", "START<function=edit>\n<parameter=n>\n1\n</parameter>\nEND.", ".", [{"n": 1}]),
    ("qwen3_coder", "START<function=edit>\n<parameter=text>\n a\n</function>END", "", [{"text": " a"}]),
    ("qwen3_coder", "START<function=edit>\n<parameter=text>\n a\n<parameter=n>\n1\n</parameter>\n</function>END",
     "", [{"text": " a", "n": 1}]),
    ("qwen3_coder", "START<function=edit>\n<parameter=text>\na END b\n</parameter>\nEND.", ".", [{"text": "a END b"}]),
    ("qwen3_coder", "START<function=edit>\n<parameter=text>\na <parameter=n> b\n</parameter>\n</function>\nEND", "",
     [{"text": "a <parameter=n> b"}]),
    ("qwen3_coder", "STARTI call <function=edit>\nwith\n<parameter=text>\na\n</parameter>\nand\n<parameter=n>\n1\n"
     "</parameter>\nnow\n</function>END", "", [{"text": "a", "n": 1}]),
    ("qwen3_coder", "STARTSTART<function=edit>\n</function>END", "", [{}]),
    ("qwen3_coder", 'START{"name": "edit", "arguments": {"n": 1}}END', "", [{"n": 1}]),
    ("qwen3_coder", "START<function=edit>\n<parameter=text>\nrm -rf /END", None, []),
    ("qwen3_coder", "START<function=edit>\n<parameter=text>\na END b", None, []),
    ("glm47", "STARTeditEND", "", [{}]),
    ("glm47", "STARTedit <arg_key>n</arg_key>\\n<arg_value>1</arg_value>END", "", [{"n": 1}]),
    ("glm47", 'START{"name": "edit", "arguments": {"text": " a"}}END', "", [{"text": " a"}]),
    ("glm47", "STARTI edit the fileEND", "I edit the file", []),
    ("minicpm5", 'START"edit"><param name="text"><![CDATA[a</param></function>\n<b> ]]></param>END', "",
     [{"text": "a</param></function>\n<b> "}]),
    ("kimi_k3", 'START<|open|>call tool="edit"<|sep|><|open|>json type="object"<|sep|>{"n": 1}<|close|>json<|sep|>'
     "<|close|>call<|sep|>END", "", [{"n": 1}]),
    ("kimi_k3", 'START<|open|>call index="1" tool="edit"<|sep|><|open|>argument type="integer" key="n"<|sep|>1'
     "<|close|>argument<|sep|><|close|>call<|sep|>END", "", [{"n": 1}]),
    ("mistral", 'STARTedit[CALL_ID]abc123DEF[ARGS]{"n": 1}', "", [{"n": 1}]),
    ("mistral", 'STARTedit[ARGS]{"text": "a\nb"}', "", [{"text": "a\nb"}]),
    ("mistral", 'START[{"name": "edit", "arguments": {"n": 1}}]', "", [{"n": 1}]),
    ("mistral", 'STARTedit[ARGS]{"n": 1}STARTedit[ARGS]{"n": 2}', "", [{"n": 1}, {"n": 2}]),
    ("json_tools", 'START{{"name": "edit", "arguments": {"n": 1}}}END', "", [{"n": 1}]),
    ("json_tools", 'START{"name": "edit", "arguments": {{"n": 1}}}END', "", [{"n": 1}]),
    ("json_tools", 'START[[{"name": "edit", "arguments": {"n": 1}}]]END', "", [{"n": 1}]),
    ("json_tools", 'STARTI call {"name": "edit", "arguments": {"n": 1}} now.END', "", [{"n": 1}]),
    ("json_tools", 'START{"name": "edit", "arguments": {"text": "a\\d \'b\'"}}END', "", [{"text": "a\\d 'b'"}]),
    ("json_tools", 'START{"name": "edit", "arguments": {"text": "say "a" b"}}END', None, []),
    ("json_tools", 'START{"name": "edit", "arguments": {"items": ["say "a" b"]}}END', None, []),
    ("kimi_k2", 'START<|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>{"map": {}<|tool_call_end|>END',
     "", [{"map": {}}]),
    ("json_tools", 'START{"name": "edit", "arguments": {"n": 1END', None, []),
    ("gemma4", "STARTcall:edit{n:1,more:2024-05-01,text:a, b}END", "",
     [{"n": 1, "more": "2024-05-01", "text": "a, b"}]),
    ("function_gemma", "STARTcall:edit{map:{a:{b:[1,None]}},text:<escape>}<escape>}END", "",
     [{"map": {"a": {"b": [1, None]}}, "text": "}"}]),
    ("pythonic", "START[edit(text='a\nb'), edit(n=2)]END", "", [{"text": "a\nb"}, {"n": 2}]),
    ("pythonic", "STARTedit(n=1)END", "", [{"n": 1}]),
    ("pythonic", "START[[edit(n=1)]]END", "", [{"n": 1}]),
    ("pythonic", "START[edit(from='a', map={'b': true})]END", "", [{"from": "a", "map": {"b": True}}]),
    ("pythonic", 'START[edit(text="""a "b"\n""")]END', "", [{"text": 'a "b"\n'}]),
    ("pythonic", 'START[edit("a")]END', '[edit("a")]', []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "written", "text", "wanted"), REPAIRED)
def test_a_call_with_mistakes_is_repaired_or_is_text(answering, name, written, text, wanted):
    for step in (None, 1, 5):
        found, calls = answering(name, written, step)
        module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
        marked = json.dumps(wanted).replace("END", module.tool_call_end)
        assert calls == [("edit", arguments) for arguments in json.loads(marked)]
        assert text is None or found == text


def test_a_tool_without_properties_gets_text(answering):
    tool = {"type": "function", "function": {"name": "edit", "parameters": {"type": "object"}}}
    call = WRITERS["qwen3_coder"]("edit", {"a": "5", "b": "</parameter>"})
    wanted = [("edit", {"a": "5", "b": "</parameter>"})]
    assert answering("qwen3_coder", f"START{call}END", tool=tool)[1] == wanted
