"""Render chats as token ids."""

import re
from functools import cached_property
from itertools import pairwise
from typing import Any

from ..completions.chat_template import apply_template
from ..engine.tokenizer_limit import ignore_length_limit
from ..errors import SnapKVError

MARKER = "<query>"  # placeholder for the question in a chat template


class Rendering:
    """Renders a conversation's messages as token ids, and caches the result so that only new text is tokenized.

    The rendered text is split before special tokens. Because no token crosses a special token, tokenizing the pieces
    gives the same result as tokenizing the whole text. If that is not certain, as with tokenizers written in Python,
    the text is not split.
    """

    def __init__(self, tokenizer):
        """Store the tokenizer, and turn off its length warning."""
        ignore_length_limit(tokenizer)
        self._tokenizer = tokenizer
        self._tokens_by_piece: dict[str, list[int]] = {}  # pieces of the last rendered text

    def __call__(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        """Render messages with the chat template, and return the token ids.

        Args:
            messages: dicts with `role` and `content`.
            **options: template options, such as `add_generation_prompt`.

        Raises: SnapKVError: the chat template fails.
        """
        if self._cut_pattern is None:
            return list(apply_template(self._tokenizer, messages, **options))
        text = apply_template(self._tokenizer, messages, tokenize=False, **options)
        cuts = [match.start() for match in self._cut_pattern.finditer(text)]
        spans = pairwise([0, *cuts, len(text)])
        pieces = [text[start:end] for start, end in spans if start < end]
        cached_tokens = self._tokens_by_piece
        # Forget pieces that are no longer used, to free memory.
        self._tokens_by_piece = {
            piece: cached_tokens.get(piece) or self._encode(piece) for piece in pieces
        }
        return [token for piece in pieces for token in self._tokens_by_piece[piece]]

    def _encode(self, text: str) -> list[int]:
        """Encode text, without adding special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def _cut_pattern(self) -> re.Pattern[str] | None:
        """Return a pattern that matches the special tokens at which text can be split.

        Return None if text can't be split.

        Only special tokens in the chat template are considered. A token qualifies if its text is always encoded as that
        token, regardless of the surrounding text.
        """
        if not getattr(self._tokenizer, "is_fast", False):
            return None
        tokens_by_id = self._tokenizer.added_tokens_decoder
        # A `single_word` token is only recognised next to certain characters.
        if any(token.single_word for token in tokens_by_id.values()):
            return None
        user_message = {"role": "user", "content": "x"}
        answer = {"role": "assistant", "content": "x"}
        try:
            ids_in_chat = apply_template(
                self._tokenizer, [user_message, answer, user_message], add_generation_prompt=True
            )
        except SnapKVError:
            return None
        special_ids_in_chat = tokens_by_id.keys() & set(ids_in_chat)
        ids_to_cut_at = filter(self._is_always_encoded, special_ids_in_chat)
        texts = [tokens_by_id[token_id].content for token_id in ids_to_cut_at]
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    def _is_always_encoded(self, token_id: int) -> bool:
        """Return whether a special token's text is always encoded as exactly that token."""
        tokens_by_id = self._tokenizer.added_tokens_decoder
        token = tokens_by_id[token_id]
        # A `normalized` token may match text that differs from its own. An `lstrip` token absorbs spaces before it.
        if token.normalized or token.lstrip:
            return False
        text = token.content
        special_texts = [special.content for special in tokens_by_id.values()]
        beginnings = tuple(text[:length] for length in range(1, len(text)))
        # If another token's text ends with a prefix of this token's text, the other token could be matched first.
        if any(special_text.endswith(beginnings) for special_text in special_texts):
            return False
        # A longer token that contains this token's text would be matched instead.
        n_containing = sum(text in special_text for special_text in special_texts)
        is_within_other = n_containing > 1  # the token itself contains its text
        if is_within_other:
            return False
        return self._encode(text) == [token_id]


def mlx_lm_suffix(tokenizer, question: str, ignore_chat_template: bool = False) -> list[int]:
    """Return the tokens of a question about a prompt saved by `mlx_lm.cache_prompt`.

    These are the tokens that mlx-lm's `generate` feeds to the model. Without the chat template, `generate` may add a
    second beginning-of-text token, which is left out here.

    Raises: SnapKVError: the chat template fails, or omits the question.
    """
    suffix = question
    if not ignore_chat_template and tokenizer.has_chat_template:

        def render(text: str) -> str:
            messages = [{"role": "user", "content": text}]
            return apply_template(tokenizer, messages, tokenize=False, add_generation_prompt=True)

        text_with_marker = render(MARKER)
        if MARKER not in text_with_marker:
            raise SnapKVError("this model's chat template drops the question")
        # The saved prompt ends just before the question.
        question_start = text_with_marker.index(MARKER)
        suffix = render(question)[question_start:]
    return tokenizer.encode(suffix, add_special_tokens=False)
