"""Create llguidance matchers, which enforce a grammar token by token."""

import re
from typing import Any
from weakref import WeakKeyDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from ..errors import SnapKVError, brief

# Maximum number of optional properties in an object.
MAX_OPTIONAL_PROPERTIES = 1000
# The parser needs four items for each optional property that may come next. Five leave a margin.
LIMITS = LLParserLimits(max_items_in_row=5 * MAX_OPTIONAL_PROPERTIES)
MAX_REASON_LENGTH = 200  # maximum number of characters quoted from llguidance's error message

_tokenizers: WeakKeyDictionary[Any, LLTokenizer] = WeakKeyDictionary()


def llguidance_tokenizer(tokenizer) -> LLTokenizer:
    """Return llguidance's version of a tokenizer, with the bytes of all tokens.

    The result is cached, because a large vocabulary takes seconds to convert.

    Raises: SnapKVError: llguidance can't convert the tokenizer, for example because it is not a fast tokenizer.
    """
    if tokenizer not in _tokenizers:
        end_tokens = sorted(token for token in tokenizer.eos_token_ids if token < len(tokenizer))
        try:
            _tokenizers[tokenizer] = from_tokenizer(tokenizer._tokenizer, eos_token=end_tokens)
        except Exception as error:
            raise SnapKVError(
                f"this model's tokenizer allows no JSON schema and no forced call: {brief(error)}"
            ) from error
    return _tokenizers[tokenizer]


def make_matcher(tokenizer, grammar: str, grammar_name: str = "the grammar") -> LLMatcher:
    """Return a matcher for a Lark grammar, positioned at the start of an answer.

    Raises: SnapKVError: llguidance does not support the grammar or the tokenizer. The error calls the grammar
        `grammar_name`.
    """
    matcher = LLMatcher(llguidance_tokenizer(tokenizer), grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise SnapKVError(f"{grammar_name} can't be enforced: {error_reason(matcher)}")
    return matcher


def error_reason(matcher: LLMatcher) -> str:
    """Return a matcher's error for use in a sentence, without llguidance's prefixes and quotations."""
    # Clients have no use for quoted grammar lines or the parser's state.
    quotation = re.compile(r"(\n +\d+ \||\n<state>).*", re.DOTALL)
    reason = quotation.sub("", matcher.get_error())
    has_hit_limit = reason.startswith("panic: ")
    if has_hit_limit:
        return "it is too large"
    position = r"^at \d+\(\d+\): (failed to compile JSON schema: )?"  # e.g. "at 1(8): "
    parser_prefix = "^Parser Error: "
    advice = "; consider .*"
    reason = re.sub(f"{position}|{parser_prefix}|{advice}", "", reason)
    if "coerce_one_of" in reason:
        return "parts of a oneOf may overlap, so use anyOf"
    reason = " ".join(reason.split()).replace("Unimplemented keys", "unsupported keywords")
    return reason[:MAX_REASON_LENGTH]
