"""What a request demands of its answer, JSON of a schema or a call of a tool, as a grammar."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from mlx_lm.tool_parsers import json_tools, mistral

from ..errors import SnapKVError
from .matcher import MOST_OPTIONAL, make_matcher, vocabulary
from .response_format import OBJECT, Schema

# JSON on one line: a small model would fill its answer with white space wherever it may.
LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
MOST_STARTS = 16  # brackets of a prefill that may begin its JSON
TOO_LARGE = "the tools' parameters are left out: together they are too large to be enforced"
# The formats that llguidance enforces; others only annotate, as JSON Schema has it.
FORMATS = set("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
# Keywords that llguidance doesn't know, by the values with which they demand nothing.
NO_DEMANDS: dict[str, tuple] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
}


class TooLargeTogether(SnapKVError):
    """Schemas of which each alone could be enforced."""


@dataclass(frozen=True)
class Form:
    """What an answer must be.

    Attributes:
        grammar: llguidance's Lark.
        kind: "json", a "marked call" as the model's tool parser reads it, or the JSON of a "call", name and arguments.
        begun: what stands before the answer of the JSON that it goes on with.
        note: a sentence on what of the demand is left out.
    """

    grammar: str
    kind: Literal["json", "call", "marked call"] = "json"
    begun: str = ""
    note: str = ""


def json_form(
    schema: Schema, tokenizer, state: str | None, what: str, may_call: bool = False
) -> Form:
    """JSON that obeys a schema, or instead, if it `may_call`, calls of tools as the model likes.

    `state` is of mlx-lm's `TextStateMachine` at the beginning, None for text that has no thoughts.

    Raises: SnapKVError: the schema can't be enforced; `what` is its name.
    """
    answer = f"%json {_enforceable(schema)}"
    if may_call and tokenizer.tool_call_start:
        answer = f"({answer} | {_words(tokenizer.tool_call_start, tokenizer)} <[*]>*)"
    return Form(_grammar(answer, tokenizer, state, {what: schema}))


def continued(form: Form, prefill: str, tokenizer) -> Form:
    """The form of an answer that goes on with a prefill, which may have begun with the JSON."""
    brackets = [match.start() for match in re.finditer(r"[\[{]", prefill)]
    starts = [prefill[start:] for start in brackets[:MOST_STARTS]] or [prefill.lstrip()]
    for json_text in starts:
        on_one_line = re.sub(r"\s*\n\s*", "", json_text)  # no string of JSON has a line break
        ways = (json_text, json_text.rstrip(), on_one_line, on_one_line.rstrip())
        for text in dict.fromkeys(ways):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            if tokens and make_matcher(tokenizer, form.grammar).consume_tokens(tokens):
                return replace(form, begun=text)
    return form


def call_form(tools: list[dict[str, Any]], tokenizer, state: str) -> Form:
    """One call of one of these tools, in the format that the model's tool parser reads, or else as JSON.

    Raises: SnapKVError: a tool has no name, or the schema of its parameters can't be enforced.
    """
    schemas = {name_of(tool): _arguments(tool["function"].get("parameters")) for tool in tools}
    try:
        return _call_form(schemas, tokenizer, state)
    except TooLargeTogether:
        loose = _call_form(dict.fromkeys(schemas, OBJECT), tokenizer, state)
        return replace(loose, note=TOO_LARGE)


def _call_form(schemas: dict[str, Schema], tokenizer, state: str) -> Form:
    parser, words = tokenizer.tool_parser, partial(_words, tokenizer=tokenizer)
    start, end = words(tokenizer.tool_call_start or ""), words(tokenizer.tool_call_end or "")
    kind: Any = "marked call"
    if parser is mistral.parse_tool_call and "[ARGS]" in str(tokenizer.chat_template):
        calls = [f"{words(f'{name}[ARGS]')} %json {_enforceable(s)}" for name, s in schemas.items()]
        answer = f"{start} ({' | '.join(calls)})"
    elif parser is mistral.parse_tool_call:
        answer = f'{start} "[" ({_json_calls(schemas)}) "]"'
    elif parser is json_tools.parse_tool_call:
        answer = f'{start} "\\n"? ({_json_calls(schemas)}) "\\n"? {end}'
    else:
        answer, kind = f"({_json_calls(schemas)})", "call"
    named = {f"the parameters of the tool {name!r}": s for name, s in schemas.items()}
    return Form(_grammar(answer, tokenizer, state, named), kind)


def name_of(tool: dict[str, Any]) -> str:
    """Raises: SnapKVError: it has none."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise SnapKVError("tools must each have a function with a name, for a call to be forced")
    return name


def _json_calls(schemas: dict[str, Schema]) -> str:
    """Calls as JSON objects; their arguments are grammars of their own, which their references stay in."""
    calls = []
    for name, schema in schemas.items():
        start = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        calls.append(f'{_text(start)} %json {_enforceable(schema)} "}}"')
    return " | ".join(calls)


def _arguments(parameters: Any) -> Schema:
    """The schema of a call's arguments: an object, of the properties that it names if it names some."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        return OBJECT
    named, required = parameters.get("properties"), parameters.get("required") or []
    names_all = (
        isinstance(named, dict)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in named for name in required)
    )
    is_open = parameters.keys() & {"patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
    closed = {"additionalProperties": False} if names_all and not is_open else {}
    return {"type": "object", **closed, **parameters}


def _enforceable(schema: Schema) -> str:
    """A schema for llguidance, whose answers are one line."""
    if schema is False:
        return "false"
    rules = {} if schema is True else _simplified(schema)
    return json.dumps(rules | {"x-guidance": LINE})


def _simplified(schema: Any) -> Any:
    """A schema without what demands nothing, and with whole numbers such as 2.0 as 2."""
    if isinstance(schema, list):
        return [_simplified(part) for part in schema]
    if isinstance(schema, float) and schema.is_integer():
        return int(schema)
    if not isinstance(schema, dict):
        return schema
    simpler = {}
    for name, part in schema.items():
        if name in SCHEMAS_BY_NAME and isinstance(part, dict):
            simpler[name] = {key: _simplified(value) for key, value in part.items()}
        elif name == "const" or (name == "enum" and part is not None):
            simpler[name] = part
        elif not _is_idle(name, part):
            simpler[name] = _simplified(part)
    return simpler


def _is_idle(name: str, part: Any) -> bool:
    """Whether a keyword with this value demands nothing, though llguidance refuses it."""
    if part is None:  # as some languages write an empty list
        return name != "default"
    if name == "format":
        return isinstance(part, str) and part not in FORMATS
    return any(type(part) is type(idle) and part == idle for idle in NO_DEMANDS.get(name, ()))


def _grammar(answer: str, tokenizer, state: str | None, schemas: dict[str, Schema]) -> str:
    """The grammar of an answer after what a model may say before it: its thoughts.

    Raises: SnapKVError: one of the schemas in it can't be enforced; their names say which.
    """
    before, rules = "", "TEXT: /(.|\\n)*/\n"
    if state is not None and tokenizer.has_thinking:
        words = partial(_pieces, tokenizer=tokenizer)
        first, *rest = words(tokenizer.think_end)
        if first.startswith("<["):
            last = f"TEXT {first}"
        else:
            last = "until"
            rules += f"until[lazy]: TEXT {first}\n"
        rules += f'thoughts: {" ".join([last, *rest])} "\\n\\n"?\n'
        before = "thoughts"
        if state != "reasoning":
            before = f"({' '.join(words(tokenizer.think_start))} thoughts)?"
    grammar = f"start: {before} {answer}\n{rules}"
    for what, schema in schemas.items():
        if (n := max(_optional(schema), default=0)) > MOST_OPTIONAL:
            raise SnapKVError(
                f"{what} can't be enforced: an object has {n} optional properties, and {MOST_OPTIONAL} are the most"
            )
    try:
        make_matcher(tokenizer, grammar)
    except SnapKVError:
        for what, schema in schemas.items():
            make_matcher(tokenizer, f"start: %json {_enforceable(schema)}", what)
        if len(schemas) > 1:
            raise TooLargeTogether("the schemas are too large together") from None
        raise
    return grammar


def _optional(schema: Any) -> Iterator[int]:
    """How many optional properties each object in a schema has."""
    parts = schema
    if isinstance(schema, dict):
        parts, named, required = schema.values(), schema.get("properties"), schema.get("required")
        if isinstance(named, dict):
            needed = required if isinstance(required, list) else []
            yield len(named.keys() - {name for name in needed if isinstance(name, str)})
    if not isinstance(parts, str | int | float | None):
        for part in parts:
            yield from _optional(part)


def _words(text: str, tokenizer) -> str:
    return " ".join(_pieces(text, tokenizer))


def _pieces(text: str, tokenizer) -> list[str]:
    """A text in a grammar, in which some tokens, such as a marker of calls, go by their number."""
    tokens = vocabulary(tokenizer)
    special = {
        str(token): number
        for number, token in tokenizer.added_tokens_decoder.items()
        if number < tokens.vocab_size and tokens.is_special_token(number) and str(token) in text
    }
    longest_first = sorted(special, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if special else [text]
    return [f"<[{special[part]}]>" if part in special else _text(part) for part in parts if part]


def _text(text: str) -> str:
    return json.dumps(text)
