"""Constrained decoding: a grammar for a request, and the logits processor that keeps the answer to it."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.tool_parsers import json_tools, mistral

from ..errors import SnapKVError, brief

Schema = dict[str, Any] | bool

# JSON on one line: a small model would fill its answer with white space wherever it may.
LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# The formats that llguidance enforces; others only annotate, as JSON Schema has it.
FORMATS = set("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
# Keywords that llguidance doesn't know, by the values with which they demand nothing.
IDLE: dict[str, tuple] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
}
CLOSERS = '}]",:0'  # what ends JSON soonest, the best first
QUOTE, IN_STRING = '"', "~"  # what ends a string; where this may come, a string has begun
LONGEST_END = 512  # tokens
# An object's optional properties may come in any number at any place: each takes 4 items of the parser's row.
MOST_OPTIONAL = 1000
LIMITS = LLParserLimits(max_items_in_row=5 * MOST_OPTIONAL)
GROWTH = 3  # by how many tokens the way to the end may grow with a token
SHOWN = 200  # characters of what the library says of a schema

_vocabularies: WeakKeyDictionary[Any, LLTokenizer] = WeakKeyDictionary()


def vocabulary(tokenizer) -> LLTokenizer:
    """The bytes of all tokens: made once a tokenizer, which takes seconds for a large vocabulary.

    Raises: SnapKVError: the tokenizer is not one of Hugging Face's tokenizers library.
    """
    if tokenizer not in _vocabularies:
        ends = sorted(token for token in tokenizer.eos_token_ids if token < len(tokenizer))
        try:
            _vocabularies[tokenizer] = from_tokenizer(tokenizer._tokenizer, eos_token=ends)
        except Exception as error:
            raise SnapKVError(
                f"this model's tokenizer allows no JSON schema and no forced call: {brief(error)}"
            ) from error
    return _vocabularies[tokenizer]


@dataclass(frozen=True)
class Form:
    """What an answer must be.

    Attributes:
        grammar: llguidance's Lark.
        kind: "json", a "marked call" as the model's tool parser reads it, or the JSON of a "call", name and arguments.
    """

    grammar: str
    kind: Literal["json", "call", "marked call"] = "json"


class Constraint:
    """A logits processor that leaves only the tokens that a form allows; after its end, the end of the answer.

    mlx-lm's loops ask for it once a token, before they know the token: they hand it over as an array. Loops with
    drafts go back to an earlier token, and so does this. JSON that is about to reach `max_tokens` is closed; a call is
    not, lest somebody carries it out.

    Attributes:
        is_cut: the answer was closed before the model had said all.

    Raises: SnapKVError: the form's grammar is none.
    """

    def __init__(self, tokenizer, form: Form, max_tokens: int = -1):
        self.form, self.is_cut = form, False
        self._vocabulary = vocabulary(tokenizer)
        self._matcher = _matcher(tokenizer, form.grammar)
        self._n_prompt: int | None = None
        self._tokens: list[int] = []
        self._n_matched = 0  # of these; the matcher takes no token after its end
        self._max_tokens = max_tokens if form.kind == "json" else -1
        self._next_look = max_tokens  # how many tokens are left when the end is looked for

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._n_prompt is None:
            self._n_prompt = tokens.size
        is_next = tokens.size - self._n_prompt == len(self._tokens) + 1
        new = tokens[-1 if is_next else self._n_prompt :]
        # The device goes on with the logits while the mask is made, which needs only the tokens before them.
        mx.async_eval(new)
        mx.async_eval(logits)
        unseen: Any = new.tolist()
        if not is_next:
            n_same = sum(1 for _ in _same(unseen, self._tokens))
            self._rewind(n_same)
            unseen = unseen[n_same:]
        self._take(unseen)
        allowed = _allowed(self._matcher, logits.shape[-1])
        if self._matcher.is_error():
            raise _failure(self._matcher)
        if (forced := self._closing()) is not None:
            allowed[:] = False
            allowed[forced] = True
        return mx.where(mx.array(allowed), logits, -mx.inf)

    def _take(self, tokens: list[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
                self._n_matched += 1

    def _rewind(self, n: int) -> None:
        del self._tokens[n:]
        if self._n_matched > n:
            self._matcher.rollback(self._n_matched - n)
            self._n_matched = n
        self.is_cut, self._next_look = False, self._max_tokens

    def _closing(self) -> int | None:
        """The next token of a short way to the end, if hardly more tokens are left than it has."""
        n_left = self._max_tokens - len(self._tokens)
        if self._max_tokens < 0 or n_left > self._next_look or self._matcher.is_stopped():
            return None
        end = _short_end(self._matcher, self._vocabulary, min(n_left, LONGEST_END))
        n_end = 0 if end is None else len(end)
        if end:
            self.is_cut = n_end + 2 * GROWTH >= n_left
        elif self.is_cut:
            end = [self._vocabulary.eos_token]
        n_free = 0 if self.is_cut else (n_left - n_end) // (GROWTH + 1)
        self._next_look = n_left - 1 - n_free
        return end[0] if end and self.is_cut else None


def _allowed(matcher: LLMatcher, size: int) -> np.ndarray:
    """Of every token, whether it may come next."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, count=size, bitorder="little").view(bool)


def _short_end(matcher: LLMatcher, ll_tokenizer: LLTokenizer, most: int) -> list[int] | None:
    """Few tokens, `most` at most, after which the grammar lets an answer end; None if those found are more."""
    matcher, tokens = matcher.deep_copy(), list[int]()
    quote, in_string, *closers = (
        ll_tokenizer.greedy_tokenize(c)[0] for c in (QUOTE, IN_STRING, *CLOSERS)
    )
    was_in_string = False
    while not matcher.is_accepting():
        new = matcher.compute_ff_tokens()
        if not new:
            bits = matcher.compute_bitmask()
            may_come = [t for t in (in_string, quote, *closers) if bits[t // 8] >> t % 8 & 1]
            is_in_string = may_come[:2] == [in_string, quote]
            if is_in_string and was_in_string:
                return None  # a quote ends every string of JSON, so these are thoughts
            was_in_string = is_in_string
            best = [quote] if is_in_string else [t for t in closers if t in may_come]
            new = best[:1] or [int(_allowed(matcher, ll_tokenizer.vocab_size).argmax())]
        tokens += new
        if len(tokens) > most or not matcher.consume_tokens(new):
            return None
    return tokens


def _same(*sequences: list[int]) -> Iterator[int]:
    """What they begin with in common."""
    for a, b in zip(*sequences):
        if a != b:
            return
        yield a


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


def call_form(tools: list[dict[str, Any]], tokenizer, state: str) -> Form:
    """One call of one of these tools, in the format that the model's tool parser reads, or else as JSON.

    Raises: SnapKVError: a tool has no name, or the schema of its parameters can't be enforced.
    """
    schemas = {name_of(tool): _arguments(tool["function"].get("parameters")) for tool in tools}
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
        start = f'{{"name": {json.dumps(name)}, "arguments": '
        calls.append(f'{_text(start)} %json {_enforceable(schema)} "}}"')
    return " | ".join(calls)


def _arguments(parameters: Any) -> Schema:
    """The schema of a call's arguments: an object, of the properties that it names if it names some."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        return {"type": "object"}
    closed = {} if "properties" not in parameters else {"additionalProperties": False}
    if parameters.keys() & {"patternProperties", "allOf", "anyOf", "oneOf", "$ref"}:
        closed = {}
    return {"type": "object", **closed, **parameters}


def _enforceable(schema: Schema) -> str:
    """A schema for llguidance, whose answers are one line."""
    if schema is False:
        return "false"
    rules = {} if schema is True else _enforced(schema)
    return json.dumps(rules | {"x-guidance": LINE})


def _enforced(schema: Any) -> Any:
    """A schema without what demands nothing, and with whole numbers such as 2.0 as 2."""
    if isinstance(schema, list):
        return [_enforced(part) for part in schema]
    if isinstance(schema, float) and schema.is_integer():
        return int(schema)
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, part in schema.items():
        if name in SCHEMAS_BY_NAME and isinstance(part, dict):
            kept[name] = {key: _enforced(its) for key, its in part.items()}
        elif name in ("const", "enum"):
            kept[name] = part
        elif not _is_idle(name, part):
            kept[name] = _enforced(part)
    return kept


def _is_idle(name: str, part: Any) -> bool:
    """Whether a keyword with this value demands nothing, though llguidance refuses it."""
    if name == "format":
        return isinstance(part, str) and part not in FORMATS
    return any(type(part) is type(idle) and part == idle for idle in IDLE.get(name, ()))


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
        _matcher(tokenizer, grammar)
    except SnapKVError:
        for what, schema in schemas.items():
            _matcher(tokenizer, f"start: %json {_enforceable(schema)}", what)
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


def _matcher(tokenizer, grammar: str, what: str = "the grammar") -> LLMatcher:
    """Raises: SnapKVError: the grammar can't be enforced; `what` is its name."""
    matcher = LLMatcher(vocabulary(tokenizer), grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise SnapKVError(f"{what} can't be enforced: {_reason(matcher)}")
    return matcher


def _failure(matcher: LLMatcher) -> Exception:
    """Why an answer can't go on: its form takes too much, or what was sampled is not what was allowed."""
    why = _reason(matcher)
    if "satisfy the grammar" in why:
        return RuntimeError(f"the answer has left its grammar: {why}")
    return SnapKVError(f"the answer's schema is too complex to be enforced: {why}")


def _reason(matcher: LLMatcher) -> str:
    """What the library says, without the lines of the grammar that it quotes, and its state."""
    reason = re.sub(r"(\n +\d+ \||\n<state>).*", "", matcher.get_error(), flags=re.DOTALL)
    reason = re.sub(
        r"^at \d+\(\d+\): (failed to compile JSON schema: )?|^Parser Error: |; consider .*",
        "",
        reason,
    )
    if "coerce_one_of" in reason:
        return "parts of a oneOf may overlap, so use anyOf"
    return " ".join(reason.split()).replace("Unimplemented keys", "unsupported keywords")[:SHOWN]


def _words(text: str, tokenizer) -> str:
    return " ".join(_pieces(text, tokenizer))


def _pieces(text: str, tokenizer) -> list[str]:
    """A text in a grammar, in which some tokens, such as a marker of calls, go by their number."""
    ll_tokenizer = vocabulary(tokenizer)
    special = {
        str(token): number
        for number, token in tokenizer.added_tokens_decoder.items()
        if number < ll_tokenizer.vocab_size
        and ll_tokenizer.is_special_token(number)
        and str(token) in text
    }
    longest_first = sorted(special, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if special else [text]
    return [f"<[{special[part]}]>" if part in special else _text(part) for part in parts if part]


def _text(text: str) -> str:
    return json.dumps(text)
