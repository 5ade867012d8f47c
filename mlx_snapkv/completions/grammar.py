"""Build llguidance grammars (in Lark) for answers that must be a tool call or follow a JSON schema."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlx_lm.tool_parsers import json_tools, mistral

from ..errors import SnapKVError
from .argument_types import types_of
from .matcher import MAX_OPTIONAL_PROPERTIES, llguidance_tokenizer, make_matcher
from .response_format import ANY_OBJECT, Schema

# JSON on one line. If whitespace is allowed, small models fill their answers with it.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# At most this many brackets in a prefill are tried as the start of the JSON.
MAX_PREFILL_STARTS = 16
TOO_LARGE_NOTE = "the tools' parameters are left out: together they are too large to be enforced"
# Keywords that may allow properties beyond those in `properties`.
MAY_ALLOW_MORE = set("patternProperties minProperties allOf anyOf oneOf $ref const enum".split())
LITERAL_KEYWORDS = {"const", "enum", "default", "examples"}  # their values are never schemas
# Values of `format` that llguidance enforces. JSON Schema lets validators ignore all others.
ENFORCED_FORMATS = set("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
# Keywords whose value is an object that maps names to schemas.
SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
# Maps keywords that llguidance does not support to the values with which they restrict nothing.
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
        prefill: the start of the JSON, if the prompt ends with it and the answer contains only the rest. "" if the
            answer contains the whole JSON.
        note: a sentence for the client about what is not enforced, or "".
    """

    grammar: str
    kind: Literal["json", "call", "marked call"] = "json"
    prefill: str = ""
    note: str = ""


def json_format(
    schema: Schema, tokenizer, state: str | None, schema_name: str, may_call: bool = False
) -> AnswerFormat:
    """Return the format for an answer that must follow a JSON schema.

    Args:
        schema: a JSON schema.
        tokenizer: the model's tokenizer, with its reasoning and call markers.
        state: initial state of mlx-lm's `TextStateMachine`, or None for answers without reasoning.
        schema_name: how errors refer to the schema.
        may_call: whether tool calls are allowed instead of the JSON. The format of such calls is not enforced.

    Raises: SnapKVError: the schema can't be enforced.
    """
    answer = f"%json {_schema_json(schema)}"
    if may_call and tokenizer.tool_call_start:
        call_start = _terminals(tokenizer.tool_call_start, tokenizer)
        any_tokens = "<[*]>*"
        answer = f"({answer} | {call_start} {any_tokens})"
    return AnswerFormat(_answer_grammar(answer, tokenizer, state, {schema_name: schema}))


def continue_json(answer_format: AnswerFormat, prefill: str, tokenizer) -> AnswerFormat:
    """Return the format for an answer that continues `prefill`, which may end with the start of the JSON.

    The JSON starts at the first bracket from which the grammar accepts the rest of the prefill. If there are no
    brackets, the whole prefill is tried. The grammar forbids trailing whitespace and line breaks, so they are dropped
    if necessary. If nothing is accepted, the answer must contain the whole JSON.
    """
    bracket_positions = [match.start() for match in re.finditer(r"[\[{]", prefill)]
    starts_of_json = [prefill[position:] for position in bracket_positions[:MAX_PREFILL_STARTS]]
    if not starts_of_json:
        starts_of_json = [prefill.lstrip()]
    candidates = [spelling for start in starts_of_json for spelling in _spellings(start)]
    for candidate in candidates:
        tokens = tokenizer.encode(candidate, add_special_tokens=False)
        if not tokens:
            continue
        matcher = make_matcher(tokenizer, answer_format.grammar)
        is_accepted = matcher.consume_tokens(tokens)
        if is_accepted:
            return replace(answer_format, prefill=candidate)
    return answer_format


def _spellings(json_text: str) -> list[str]:
    """Return versions of the start of JSON: unchanged, and without trailing whitespace, line breaks or both."""
    on_one_line = re.sub(r"\s*\n\s*", "", json_text)  # JSON strings contain no line breaks
    spellings = (json_text, json_text.rstrip(), on_one_line, on_one_line.rstrip())
    return list(dict.fromkeys(spellings))


def tool_call_format(tools: list[dict[str, Any]], tokenizer, state: str) -> AnswerFormat:
    """Return the format for an answer that must be a single call to one of the tools.

    If the tools' schemas are too large to be enforced in one grammar, any object is allowed as arguments. The format's
    `note` then says so.

    Raises: SnapKVError: a tool has no name, or its parameter schema can't be enforced.
    """
    schemas: dict[str, Schema] = {}  # keyed by tool name
    for tool in tools:
        name = tool_name(tool)
        schemas[name] = _arguments_schema(name, tool["function"].get("parameters"))
    try:
        return _format_of_tool_call(schemas, tokenizer, state)
    except TooLargeTogether:
        any_arguments = dict.fromkeys(schemas, ANY_OBJECT)
        return replace(_format_of_tool_call(any_arguments, tokenizer, state), note=TOO_LARGE_NOTE)


def _format_of_tool_call(schemas: dict[str, Schema], tokenizer, state: str) -> AnswerFormat:
    """Return the format for an answer that must be a single call. `schemas` maps tool names to argument schemas.

    The call uses the model's own notation if this function has a grammar for it. Otherwise, the call is a JSON object.
    Newer Mistral models write `[TOOL_CALLS]NAME[ARGS]{...}`, and older ones write `[TOOL_CALLS][{...}]`.
    """
    parser = tokenizer.tool_parser
    start_marker = _terminals(tokenizer.tool_call_start or "", tokenizer)
    end_marker = _terminals(tokenizer.tool_call_end or "", tokenizer)
    is_mistral = parser is mistral.parse_tool_call
    has_names_before_arguments = is_mistral and "[ARGS]" in str(tokenizer.chat_template)
    kind: Literal["call", "marked call"] = "marked call"
    if has_names_before_arguments:
        calls = [
            f"{_terminals(f'{name}[ARGS]', tokenizer)} %json {_schema_json(schema)}"
            for name, schema in schemas.items()
        ]
        answer = f"{start_marker} ({' | '.join(calls)})"
    elif is_mistral:
        answer = f'{start_marker} "[" ({_json_calls(schemas)}) "]"'
    elif parser is json_tools.parse_tool_call:
        answer = f'{start_marker} "\\n"? ({_json_calls(schemas)}) "\\n"? {end_marker}'
    else:
        answer = f"({_json_calls(schemas)})"
        kind = "call"
    schemas_for_errors = {
        f"the parameters of the tool {name!r}": schema for name, schema in schemas.items()
    }
    return AnswerFormat(_answer_grammar(answer, tokenizer, state, schemas_for_errors), kind)


def tool_name(tool: dict[str, Any]) -> str:
    """Return a tool's name.

    Raises: SnapKVError: the tool has no function with a name.
    """
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise SnapKVError("tools must each have a function with a name, for a call to be forced")
    return name


def _json_calls(schemas: dict[str, Schema]) -> str:
    """Return a Lark grammar for a call that is a JSON object, with one alternative per tool.

    Each tool's arguments have a separate `%json` grammar, so that `$ref` is resolved within that tool's schema.
    """
    calls = []
    for name, schema in schemas.items():
        quoted_name = json.dumps(name, ensure_ascii=False)
        text_before_arguments = f'{{"name": {quoted_name}, "arguments": '
        call_start = json.dumps(text_before_arguments)  # Lark quotes strings the way JSON does
        calls.append(f'{call_start} %json {_schema_json(schema)} "}}"')
    return " | ".join(calls)


def _arguments_schema(name: str, parameters: Any) -> Schema:
    """Return the schema of a call's arguments, which must be an object.

    Additional properties are forbidden in the object itself, and in nested objects that name their properties. They
    stay allowed where another part of the schema may allow or require them: see `_lists_all_properties` and
    `_combines_schemas`.

    Raises: SnapKVError: the parameters of the tool `name` can't be an object.
    """
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        return ANY_OBJECT
    types = parameters.get("type")
    if types and "object" not in types_of({"type": types}, {}):
        raise SnapKVError(f"the parameters of {name} must be an object, got the type {types!r}")
    schema = parameters if _combines_schemas(parameters) else _close_objects(parameters)
    if _lists_all_properties(parameters):
        return {"additionalProperties": False, **schema, "type": "object"}
    return {**schema, "type": "object"}


def _lists_all_properties(schema: dict[str, Any]) -> bool:
    """Return whether `properties` lists all properties that an object may or must have.

    That is the case if it includes all required properties, and no other keyword can allow more.
    """
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    has_all_required = all(isinstance(name, str) and name in properties for name in required)
    may_allow_more = bool(schema.keys() & MAY_ALLOW_MORE)
    return has_all_required and not may_allow_more


def _combines_schemas(schema: Any) -> bool:
    """Return whether several parts of a schema may describe the same object.

    Such parts must not forbid additional properties, because one part would then forbid the properties that another
    part names.
    """
    if isinstance(schema, list):
        return any(map(_combines_schemas, schema))
    if not isinstance(schema, dict):
        return False
    has_other_schemas = not schema.keys().isdisjoint({"anyOf", "oneOf", "$ref"})
    if "allOf" in schema or ("properties" in schema and has_other_schemas):
        return True
    return any(map(_combines_schemas, schema.values()))


def _close_objects(schema: Any) -> Any:
    """Forbid additional properties in objects that name their properties, at any depth of a schema.

    Objects without named properties stay open, because they may be maps. Objects also stay open if other keywords may
    allow or require properties that `properties` does not list.
    """
    if isinstance(schema, list):
        return [_close_objects(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    keywords = {
        keyword: value if keyword in LITERAL_KEYWORDS else _close_objects(value)
        for keyword, value in schema.items()
    }
    is_object_with_properties = schema.get("type") == "object" and schema.get("properties")
    if is_object_with_properties and _lists_all_properties(schema):
        return {"additionalProperties": False, **keywords}
    return keywords


def _schema_json(schema: Schema) -> str:
    """Convert a schema to JSON text for llguidance. Matching answers must be JSON on a single line."""
    if schema is False:
        return "false"
    keywords = {} if schema is True else _simplify(schema)
    return json.dumps(keywords | {"x-guidance": ONE_LINE})


def _simplify(schema: Any) -> Any:
    """Drop a schema's keywords that restrict nothing, and convert numbers such as 2.0 to 2."""
    if isinstance(schema, list):
        return [_simplify(part) for part in schema]
    if isinstance(schema, float) and schema.is_integer():
        return int(schema)
    if not isinstance(schema, dict):
        return schema
    simplified: dict[str, Any] = {}
    for keyword, value in schema.items():
        maps_names_to_schemas = keyword in SCHEMAS_BY_NAME and isinstance(value, dict)
        is_literal = keyword == "const" or (keyword == "enum" and value is not None)
        if maps_names_to_schemas:
            simplified[keyword] = {name: _simplify(part) for name, part in value.items()}
        elif is_literal:
            simplified[keyword] = value
        elif not _is_unrestrictive(keyword, value):
            simplified[keyword] = _simplify(value)
    return simplified


def _is_unrestrictive(keyword: str, value: Any) -> bool:
    """Return whether to drop a keyword, because its value restricts nothing, and llguidance may reject it."""
    if value is None:  # some languages write an empty list as null, so null restricts nothing
        return keyword != "default"
    if keyword == "format":
        return isinstance(value, str) and value not in ENFORCED_FORMATS
    unrestrictive_values = UNRESTRICTIVE.get(keyword, ())
    # Compare types as well, because True == 1 in Python.
    return any(type(value) is type(other) and value == other for other in unrestrictive_values)


def _answer_grammar(answer: str, tokenizer, state: str | None, schemas: dict[str, Schema]) -> str:
    """Return an answer's Lark grammar, including reasoning that may precede the answer.

    Args:
        answer: grammar expression for the answer without reasoning.
        tokenizer: the model's tokenizer, with its reasoning markers.
        state: see `json_format`. With "reasoning", the answer starts in the middle of reasoning.
        schemas: the schemas in `answer`, keyed by the names that errors use for them.

    Raises:
        TooLargeTogether: each schema can be enforced alone, but not all of them together.
        SnapKVError: a schema can't be enforced.
    """
    reasoning, reasoning_rules = _reasoning_grammar(tokenizer, state)
    for schema_name, schema in schemas.items():
        _require_few_optional_properties(schema, schema_name)
    grammar = f"start: {reasoning} {answer}\n{reasoning_rules}"
    try:
        make_matcher(tokenizer, grammar)
    except SnapKVError:
        # Check each schema alone, so that the error names the one at fault.
        for schema_name, schema in schemas.items():
            schema_grammar = f"start: %json {_schema_json(schema)}"
            make_matcher(tokenizer, schema_grammar, schema_name)
        if len(schemas) > 1:
            raise TooLargeTogether("the schemas are too large together") from None
        raise
    return grammar


def _require_few_optional_properties(schema: Schema, schema_name: str) -> None:
    """Check that no object in a schema has more optional properties than the matcher supports.

    Raises: SnapKVError: an object has too many.
    """
    n_optional = max(_optional_property_counts(schema), default=0)
    if n_optional > MAX_OPTIONAL_PROPERTIES:
        why = f"an object has {n_optional} optional properties, and {MAX_OPTIONAL_PROPERTIES} are the most"
        raise SnapKVError(f"{schema_name} can't be enforced: {why}")


def _reasoning_grammar(tokenizer, state: str | None) -> tuple[str, str]:
    """Return the grammar expression for reasoning before an answer, and the rules that the expression refers to.

    The expression is "" if there is no reasoning.
    """
    rules = "TEXT: /(.|\\n)*/\n"
    if state is None or not tokenizer.has_thinking:
        return "", rules
    first_end_terminal, *other_end_terminals = _terminal_list(tokenizer.think_end, tokenizer)
    text_to_end = f"TEXT {first_end_terminal}"
    ends_with_special_token = first_end_terminal.startswith("<[")
    if not ends_with_special_token:
        # TEXT would also match a plain-text end marker, so use a lazy rule, which ends at the first marker.
        rules += f"until[lazy]: {text_to_end}\n"
        text_to_end = "until"
    text_and_whole_end = " ".join([text_to_end, *other_end_terminals])
    rules += f'thoughts: {text_and_whole_end} "\\n\\n"?\n'
    if state == "reasoning":
        return "thoughts", rules
    think_start = _terminals(tokenizer.think_start, tokenizer)
    return f"({think_start} thoughts)?", rules


def _optional_property_counts(schema: Any) -> Iterator[int]:
    """Yield the number of optional properties of each object in a schema."""
    parts: Iterable[Any] = ()
    if isinstance(schema, list):
        parts = schema
    elif isinstance(schema, dict):
        parts = schema.values()
        properties = schema.get("properties")
        if isinstance(properties, dict):
            required = schema.get("required")
            names = required if isinstance(required, list) else []
            required_names = {name for name in names if isinstance(name, str)}
            optional_names = properties.keys() - required_names
            yield len(optional_names)
    for part in parts:
        yield from _optional_property_counts(part)


def _terminals(text: str, tokenizer) -> str:
    """Return text as a sequence of grammar terminals."""
    return " ".join(_terminal_list(text, tokenizer))


def _terminal_list(text: str, tokenizer) -> list[str]:
    """Return text as a list of terminals: special tokens (such as call markers) by id, and other text as strings."""
    vocabulary = llguidance_tokenizer(tokenizer)
    special_ids: dict[str, int] = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        is_special = token_id < vocabulary.vocab_size and vocabulary.is_special_token(token_id)
        if is_special and str(token) in text:
            special_ids[str(token)] = token_id
    parts = [text]
    if special_ids:
        # One token may be the start of another, so try longer ones first.
        longest_first = sorted(special_ids, key=len, reverse=True)
        any_special_token = "|".join(map(re.escape, longest_first))
        parts = re.split(f"({any_special_token})", text)
    return [
        f"<[{special_ids[part]}]>" if part in special_ids else json.dumps(part)
        for part in parts
        if part
    ]
