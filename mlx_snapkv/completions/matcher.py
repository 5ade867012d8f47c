"""llguidance's view of a tokenizer, and its matchers, which enforce a grammar token by token."""

import re
from typing import Any
from weakref import WeakKeyDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from ..errors import SnapKVError, brief

# Maximum optional properties of an object. Any of them may come next, and each takes 4 items in a row of the parser.
MAX_OPTIONAL_PROPERTIES = 1000
LIMITS = LLParserLimits(max_items_in_row=5 * MAX_OPTIONAL_PROPERTIES)
MAX_REASON_LENGTH = 200  # maximum characters of the library's error in a sentence

_vocabularies: WeakKeyDictionary[Any, LLTokenizer] = WeakKeyDictionary()


def vocabulary(tokenizer) -> LLTokenizer:
    """Return the bytes of all tokens. The result is cached per tokenizer, because large vocabularies take seconds.

    Raises: SnapKVError: the tokenizer is not from Hugging Face's tokenizers library.
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


def make_matcher(tokenizer, grammar: str, what: str = "the grammar") -> LLMatcher:
    """Return a matcher for a grammar in llguidance's Lark, at the start of an answer.

    Raises: SnapKVError: the grammar can't be enforced; `what` is its name in the sentence.
    """
    matcher = LLMatcher(vocabulary(tokenizer), grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise SnapKVError(f"{what} can't be enforced: {reason_of(matcher)}")
    return matcher


def reason_of(matcher: LLMatcher) -> str:
    """Return the error of a matcher for use in a sentence, without the library's prefixes and quotes of the grammar."""
    # Quoted lines of the grammar and the parser's state are of no use to clients.
    reason = re.sub(r"(\n +\d+ \||\n<state>).*", "", matcher.get_error(), flags=re.DOTALL)
    if reason.startswith("panic: "):  # one of the library's limits
        return "it is too large"
    reason = re.sub(
        r"^at \d+\(\d+\): (failed to compile JSON schema: )?|^Parser Error: |; consider .*",
        "",
        reason,
    )
    if "coerce_one_of" in reason:
        return "parts of a oneOf may overlap, so use anyOf"
    reason = " ".join(reason.split()).replace("Unimplemented keys", "unsupported keywords")
    return reason[:MAX_REASON_LENGTH]
