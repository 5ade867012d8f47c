"""Build llguidance grammars (in Lark) for answers that must be a tool call or follow a JSON schema."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from mlx_lm.tool_parsers import json_tools, mistral

from ..errors import SnapKVError
from .matcher import MAX_OPTIONAL_PROPERTIES, make_matcher, vocabulary
from .response_format import ANY_OBJECT, Schema

# JSON on one line. If whitespace is allowed, small models fill their answers with it.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# Number of brackets in a prefill that are tried as the start of the JSON.
MAX_PREFILL_STARTS = 16
TOO_LARGE = "the tools' parameters are left out: together they are too large to be enforced"
# Keywords that may allow properties besides those in `properties`.
NAME_OTHERS = set("patternProperties minProperties allOf anyOf oneOf $ref const enum".split())
LITERAL = {"const", "enum", "default", "examples"}  # keywords whose values are not schemas
# Values of `format` that llguidance enforces. JSON Schema allows ignoring all others.
FORMATS = set("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
# Keywords whose value is an object that maps names to schemas.
SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
# Keywords that llguidance does not support, with the values that restrict nothing.
UNRESTRICTIVE: dict[str, tuple] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
}


class TooLargeTogether(SnapKVError):
    """The schemas can each be enforced alone, but not together in one grammar."""


@dataclass(frozen=True)
class AnswerFormat:
    """The format that an answer must have.

    Attributes:
        grammar: the grammar, in llguidance's Lark.
        kind: "json" for JSON that follows a schema. "marked call" for a call in the model's own format, including its
            markers. "call" for a call as a JSON object with name and arguments, used if there is no grammar for the
            model's own format.
        prefill: start of the JSON, if it is at the end of the prompt and the answer continues it.
        note: a sentence about what is not enforced.
    """

    grammar: str
    kind: Literal["json", "call", "marked call"] = "json"
    prefill: str = ""
    note: str = ""


def json_format(
    schema: Schema, tokenizer, state: str | None, what: str, may_call: bool = False
) -> AnswerFormat:
    """Return the format for an answer that must follow a JSON schema.

    Args:
        schema: a JSON schema.
        tokenizer: the model's tokenizer, with its reasoning and call markers.
        state: initial state of mlx-lm's `TextStateMachine`, or None for answers without reasoning.
        what: how errors refer to the schema.
        may_call: whether the answer may contain tool calls instead, in any format.

    Raises: SnapKVError: the schema can't be enforced.
    """
    answer = f"%json {_enforceable(schema)}"
    if may_call and tokenizer.tool_call_start:
        # Any tokens may follow a call's start marker; `<[*]>` matches one token.
        answer = f"({answer} | {_terminals(tokenizer.tool_call_start, tokenizer)} <[*]>*)"
    return AnswerFormat(_grammar(answer, tokenizer, state, {what: schema}))


def continue_json(answer_format: AnswerFormat, prefill: str, tokenizer) -> AnswerFormat:
    """Return the format for an answer that continues `prefill`, which may end with the start of the JSON.

    The JSON starts at the first bracket from which the grammar accepts the prefill. Trailing whitespace and line
    breaks, which the grammar forbids, are dropped if necessary. If no bracket works, the answer must contain the whole
    JSON.
    """
    brackets = [match.start() for match in re.finditer(r"[\[{]", prefill)]
    starts = [prefill[start:] for start in brackets[:MAX_PREFILL_STARTS]] or [prefill.lstrip()]
    candidates = [spelling for json_text in starts for spelling in _spellings(json_text)]
    for text in candidates:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if tokens and make_matcher(tokenizer, answer_format.grammar).consume_tokens(tokens):
            return replace(answer_format, prefill=text)
    return answer_format


def _spellings(json_text: str) -> list[str]:
    """Return the start of JSON unchanged, then without trailing whitespace, then without line breaks."""
    on_one_line = re.sub(r"\s*\n\s*", "", json_text)  # JSON strings contain no line breaks
    spellings = (json_text, json_text.rstrip(), on_one_line, on_one_line.rstrip())
    return list(dict.fromkeys(spellings))


def call_format(tools: list[dict[str, Any]], tokenizer, state: str) -> AnswerFormat:
    """Return the format for one call to one of the tools.

    If the parameter schemas are too large together, the arguments may be any object, and the format has a note.

    Raises: SnapKVError: a tool has no name, or its parameter schema can't be enforced.
    """
    schemas = {
        name_of(tool): _arguments_schema(tool["function"].get("parameters")) for tool in tools
    }
    try:
        return _call_format(schemas, tokenizer, state)
    except TooLargeTogether:
        any_arguments = _call_format(dict.fromkeys(schemas, ANY_OBJECT), tokenizer, state)
        return replace(any_arguments, note=TOO_LARGE)


def _call_format(schemas: dict[str, Schema], tokenizer, state: str) -> AnswerFormat:
    """Return the format for a call that the model's tool parser can read. `schemas` maps tool names to schemas."""
    parser = tokenizer.tool_parser
    terminals = partial(_terminals, tokenizer=tokenizer)
    start = terminals(tokenizer.tool_call_start or "")
    end = terminals(tokenizer.tool_call_end or "")
    kind: Literal["call", "marked call"] = "marked call"
    if parser is mistral.parse_tool_call and "[ARGS]" in str(tokenizer.chat_template):
        calls = [
            f"{terminals(f'{name}[ARGS]')} %json {_enforceable(schema)}"
            for name, schema in schemas.items()
        ]
        answer = f"{start} ({' | '.join(calls)})"
    elif parser is mistral.parse_tool_call:
        answer = f'{start} "[" ({_json_calls(schemas)}) "]"'
    elif parser is json_tools.parse_tool_call:
        answer = f'{start} "\\n"? ({_json_calls(schemas)}) "\\n"? {end}'
    else:
        answer = f"({_json_calls(schemas)})"
        kind = "call"
    named_schemas = {
        f"the parameters of the tool {name!r}": schema for name, schema in schemas.items()
    }
    return AnswerFormat(_grammar(answer, tokenizer, state, named_schemas), kind)


def name_of(tool: dict[str, Any]) -> str:
    """Return a tool's name.

    Raises: SnapKVError: the tool has no function with a name.
    """
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise SnapKVError("tools must each have a function with a name, for a call to be forced")
    return name


def _json_calls(schemas: dict[str, Schema]) -> str:
    """Return the grammar of a call as a JSON object, with one alternative per tool.

    Each tool's arguments are a separate `%json` grammar, so that `$ref` is resolved within their own schema.
    """
    calls = []
    for name, schema in schemas.items():
        start = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        calls.append(f'{_literal(start)} %json {_enforceable(schema)} "}}"')
    return " | ".join(calls)


def _arguments_schema(parameters: Any) -> Schema:
    """Return the schema of a call's arguments, which must be an object.

    If `properties` includes all required properties, no others are allowed. The same rule applies to nested objects
    that name properties.
    """
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        return ANY_OBJECT
    closed = parameters if _combines(parameters) else _closed(parameters)
    if _names_all_properties(parameters):
        return {"type": "object", "additionalProperties": False, **closed}
    return {"type": "object", **closed}


def _names_all_properties(schema: dict[str, Any]) -> bool:
    """Return whether an object's `properties` includes all required ones, and no other keyword can allow more."""
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    names_required = (
        isinstance(properties, dict)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
    )
    return names_required and not schema.keys() & NAME_OTHERS


def _combines(schema: Any) -> bool:
    """Return whether several parts of a schema may describe the same object.

    Such parts must not be closed, because one would forbid the properties that another names.
    """
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, dict):
        return False
    keywords = schema.keys()
    if "allOf" in keywords or ("properties" in keywords and keywords & {"anyOf", "oneOf", "$ref"}):
        return True
    return any(map(_combines, schema.values()))


def _closed(schema: Any) -> Any:
    """Forbid additional properties in every object of a schema that names its properties, at any depth.

    Objects without named properties stay open, because they may be maps.
    """
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: part if key in LITERAL else _closed(part) for key, part in schema.items()}
    if (
        schema.get("type") == "object"
        and schema.get("properties")
        and _names_all_properties(schema)
    ):
        return {"additionalProperties": False, **closed}
    return closed


def _enforceable(schema: Schema) -> str:
    """Return a schema as JSON text for llguidance, set to allow only JSON on one line."""
    if schema is False:
        return "false"
    rules = {} if schema is True else _simplified(schema)
    return json.dumps(rules | {"x-guidance": ONE_LINE})


def _simplified(schema: Any) -> Any:
    """Remove keywords that restrict nothing from a schema, and convert numbers such as 2.0 to 2."""
    if isinstance(schema, list):
        return [_simplified(part) for part in schema]
    if isinstance(schema, float) and schema.is_integer():
        return int(schema)
    if not isinstance(schema, dict):
        return schema
    simpler = {}
    for keyword, value in schema.items():
        if keyword in SCHEMAS_BY_NAME and isinstance(value, dict):
            simpler[keyword] = {name: _simplified(part) for name, part in value.items()}
        elif keyword == "const" or (keyword == "enum" and value is not None):
            simpler[keyword] = value
        elif not _is_unrestrictive(keyword, value):
            simpler[keyword] = _simplified(value)
    return simpler


def _is_unrestrictive(keyword: str, value: Any) -> bool:
    """Return whether a keyword can be dropped: llguidance rejects it, but this value restricts nothing."""
    if value is None:  # some languages write an empty list as null
        return keyword != "default"
    if keyword == "format":
        return isinstance(value, str) and value not in FORMATS
    # Compare types as well, because True == 1 in Python.
    return any(
        type(value) is type(other) and value == other for other in UNRESTRICTIVE.get(keyword, ())
    )


def _grammar(answer: str, tokenizer, state: str | None, schemas: dict[str, Schema]) -> str:
    """Return an answer's Lark grammar, including reasoning that may precede the answer.

    Args:
        answer: expression for the answer without reasoning.
        tokenizer: the model's tokenizer, with its reasoning markers.
        state: see `json_format`. With "reasoning", the answer starts in the middle of reasoning.
        schemas: the schemas in `answer`, keyed by how errors refer to them.

    Raises:
        TooLargeTogether: each schema can be enforced alone, but not all together.
        SnapKVError: a schema can't be enforced.
    """
    thoughts, rules = _thoughts(tokenizer, state)
    for what, schema in schemas.items():
        _require_few_optional(schema, what)
    grammar = f"start: {thoughts} {answer}\n{rules}"
    try:
        make_matcher(tokenizer, grammar)
    except SnapKVError:
        # Compile each schema alone, so that the error names the one at fault.
        for what, schema in schemas.items():
            make_matcher(tokenizer, f"start: %json {_enforceable(schema)}", what)
        if len(schemas) > 1:
            raise TooLargeTogether("the schemas are too large together") from None
        raise
    return grammar


def _require_few_optional(schema: Schema, what: str) -> None:
    """Check that no object in a schema has more optional properties than the matcher supports.

    Raises: SnapKVError: an object has too many.
    """
    n_optional = max(_n_optional_properties(schema), default=0)
    if n_optional > MAX_OPTIONAL_PROPERTIES:
        why = f"an object has {n_optional} optional properties, and {MAX_OPTIONAL_PROPERTIES} are the most"
        raise SnapKVError(f"{what} can't be enforced: {why}")


def _thoughts(tokenizer, state: str | None) -> tuple[str, str]:
    """Return the grammar expression for reasoning before an answer, and the rules that it uses."""
    rules = "TEXT: /(.|\\n)*/\n"
    if state is None or not tokenizer.has_thinking:
        return "", rules
    first, *rest = _terminal_list(tokenizer.think_end, tokenizer)
    if first.startswith("<["):  # a special token
        end = f"TEXT {first}"
    else:
        end = "until"  # lazy: it ends at the first end marker
        rules += f"until[lazy]: TEXT {first}\n"
    rules += f'thoughts: {" ".join([end, *rest])} "\\n\\n"?\n'
    if state == "reasoning":
        return "thoughts", rules
    return f"({_terminals(tokenizer.think_start, tokenizer)} thoughts)?", rules


def _n_optional_properties(schema: Any) -> Iterator[int]:
    """Yield the number of optional properties of each object in a schema."""
    parts = schema
    if isinstance(schema, dict):
        parts = schema.values()
        properties = schema.get("properties")
        if isinstance(properties, dict):
            required = schema.get("required")
            names = required if isinstance(required, list) else []
            required_names = {name for name in names if isinstance(name, str)}
            yield len(properties.keys() - required_names)
    if not isinstance(parts, str | int | float | None):
        for part in parts:
            yield from _n_optional_properties(part)


def _terminals(text: str, tokenizer) -> str:
    """Return text as a sequence of grammar terminals."""
    return " ".join(_terminal_list(text, tokenizer))


def _terminal_list(text: str, tokenizer) -> list[str]:
    """Return text as a list of terminals: special tokens, such as call markers, by id, and other text as strings."""
    known = vocabulary(tokenizer)
    special_ids = {
        str(token): token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token_id < known.vocab_size and known.is_special_token(token_id) and str(token) in text
    }
    parts = [text]
    if special_ids:
        # One token may be the start of another, so try longer ones first.
        longest_first = sorted(special_ids, key=len, reverse=True)
        any_special = "|".join(map(re.escape, longest_first))
        parts = re.split(f"({any_special})", text)
    return [
        f"<[{special_ids[part]}]>" if part in special_ids else _literal(part)
        for part in parts
        if part
    ]


def _literal(text: str) -> str:
    return json.dumps(text)
