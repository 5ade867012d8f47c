"""llguidance: the bytes of a tokenizer's tokens, and what enforces a grammar over them."""

import re
from typing import Any
from weakref import WeakKeyDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from ..errors import SnapKVError, brief

# An object's optional properties may come in any number at any place: each takes 4 items of the parser's row.
MOST_OPTIONAL = 1000
LIMITS = LLParserLimits(max_items_in_row=5 * MOST_OPTIONAL)
MAX_REASON_LENGTH = 200  # characters of what the library says of a schema

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


def make_matcher(tokenizer, grammar: str, what: str = "the grammar") -> LLMatcher:
    """What says, token by token, which tokens a grammar allows next.

    Raises: SnapKVError: the grammar can't be enforced; `what` is its name.
    """
    matcher = LLMatcher(vocabulary(tokenizer), grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise SnapKVError(f"{what} can't be enforced: {reason_of(matcher)}")
    return matcher


def reason_of(matcher: LLMatcher) -> str:
    """What the library says, without the lines of the grammar that it quotes, and its state."""
    reason = re.sub(r"(\n +\d+ \||\n<state>).*", "", matcher.get_error(), flags=re.DOTALL)
    if reason.startswith("panic: "):  # one of the library's own limits
        return "it is too large"
    reason = re.sub(
        r"^at \d+\(\d+\): (failed to compile JSON schema: )?|^Parser Error: |; consider .*",
        "",
        reason,
    )
    if "coerce_one_of" in reason:
        return "parts of a oneOf may overlap, so use anyOf"
    return " ".join(reason.split()).replace("Unimplemented keys", "unsupported keywords")[
        :MAX_REASON_LENGTH
    ]
