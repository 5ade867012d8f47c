"""Render chats as token ids, and find the common beginning of prompts."""

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import chain, compress, count, pairwise
from operator import ne
from typing import Any

from ..completions.chat_template import apply_template
from ..engine.tokenizer_limit import ignore_length_limit
from ..errors import SnapKVError

MARKER = "<query>"  # placeholder for the question in the chat template


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens that all prompts have in common from the start."""
    first, *others = prompts

    def n_equal(other: Sequence[int]) -> int:
        differences = compress(count(), map(ne, first, other))
        return next(differences, min(len(first), len(other)))

    return min(map(n_equal, others), default=len(first))


class Rendering:
    """Renders a conversation's messages as token ids, and tokenizes only the text that is new since the last call.

    The rendered text is cut before special tokens. No token reaches across a special token, so the tokens of the pieces
    are the tokens of the whole text. If that is not certain, as with a tokenizer written in Python, the text is not
    cut.
    """

    def __init__(self, tokenizer):
        ignore_length_limit(tokenizer)
        self._tokenizer = tokenizer
        self._tokens_by_piece: dict[str, list[int]] = {}  # the pieces of the last text

    def __call__(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        """Return the token ids of messages in the chat template.

        Args:
            **options: the template's options, such as `add_generation_prompt`.

        Raises: SnapKVError: the chat template fails.
        """
        if self._cuts is None:
            return list(apply_template(self._tokenizer, messages, **options))
        text = apply_template(self._tokenizer, messages, tokenize=False, **options)
        starts = [match.start() for match in self._cuts.finditer(text)]
        pieces = [text[start:end] for start, end in pairwise([0, *starts, len(text)])]
        self._tokens_by_piece = {
            piece: self._tokens_by_piece.get(piece) or self._encoded(piece)
            for piece in pieces
            if piece
        }
        return [*chain.from_iterable(self._tokens_by_piece.get(piece, ()) for piece in pieces)]

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def _cuts(self) -> re.Pattern[str] | None:
        """A pattern of the special tokens at which a text can be cut; None without such tokens.

        These are the template's special tokens whose text always becomes that token, whatever text is around it.
        """
        if not getattr(self._tokenizer, "is_fast", False):
            return None
        added = self._tokenizer.added_tokens_decoder
        # Whether a `single_word` token is recognised depends on its neighbours.
        if any(token.single_word for token in added.values()):
            return None
        turn = [{"role": role, "content": "x"} for role in ("user", "assistant")]
        try:
            chat = apply_template(self._tokenizer, [*turn, turn[0]], add_generation_prompt=True)
        except SnapKVError:
            return None
        contents = [token.content for token in added.values()]

        def is_cut(index: int) -> bool:
            """Return whether a special token's text always becomes exactly this token."""
            token = added[index]
            beginnings = tuple(token.content[:n] for n in range(1, len(token.content)))
            # Another token that ends like this one begins would be found first.
            overlaps = any(other.endswith(beginnings) for other in contents)
            return (
                not (token.normalized or token.lstrip or overlaps)
                and sum(token.content in other for other in contents) == 1
                and self._encoded(token.content) == [index]
            )

        cuts = [re.escape(added[n].content) for n in added.keys() & set(chat) if is_cut(n)]
        return re.compile("|".join(cuts)) if cuts else None


def mlx_lm_suffix(tokenizer, question: str, ignore_chat_template: bool = False) -> list[int]:
    """Return the tokens of a question about a prompt that `mlx_lm.cache_prompt` saved.

    They are the tokens that mlx-lm's own `generate` feeds, without a second beginning-of-text token.

    Raises: SnapKVError: the chat template fails, or leaves the question out.
    """
    if not ignore_chat_template and tokenizer.has_chat_template:
        options = {"tokenize": False, "add_generation_prompt": True}
        chats = ([{"role": "user", "content": text}] for text in (MARKER, question))
        marked, with_question = (apply_template(tokenizer, chat, **options) for chat in chats)
        if MARKER not in marked:
            raise SnapKVError("this model's chat template drops the question")
        question = with_question[marked.index(MARKER) :]
    return tokenizer.encode(question, add_special_tokens=False)
