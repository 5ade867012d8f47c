"""Prompts as token ids: what a chat template makes of messages, and where prompts part."""

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import chain, compress, count, pairwise
from operator import ne
from typing import Any

from ..completions.chat_template import apply_template
from ..engine.tokenizer_limit import ignore_length_limit
from ..errors import SnapKVError

MARKER = "<query>"


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts share from the start."""
    first, *others = prompts
    return min(
        (next(compress(count(), map(ne, first, o)), min(len(first), len(o))) for o in others),
        default=len(first),
    )


class Rendering:
    """A conversation as the chat template has it, in token ids; what earlier turns said is not tokenised again.

    The text is cut before special tokens of the template's. Nothing merges across one, so the pieces' tokens are those
    of the whole text. Where that is not certain, as with a tokenizer in Python, there are no cuts.
    """

    def __init__(self, tokenizer):
        ignore_length_limit(tokenizer)
        self._tokenizer = tokenizer
        self._tokens_by_piece: dict[str, list[int]] = {}  # tokens of the last text's pieces

    def __call__(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        """Raises: SnapKVError: the chat template fails."""
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
        """The special tokens of a short chat's that are taken as they are, wherever they stand in a text."""
        if not getattr(self._tokenizer, "is_fast", False):
            return None
        added = self._tokenizer.added_tokens_decoder
        if any(token.single_word for token in added.values()):  # which look at their neighbours
            return None
        turn = [{"role": role, "content": "x"} for role in ("user", "assistant")]
        try:
            chat = apply_template(self._tokenizer, [*turn, turn[0]], add_generation_prompt=True)
        except SnapKVError:
            return None
        contents = [token.content for token in added.values()]

        def is_taken(index: int) -> bool:
            token = added[index]
            start = tuple(token.content[:n] for n in range(1, len(token.content)))
            overlaps = any(other.endswith(start) for other in contents)  # and would be found first
            return (
                not (token.normalized or token.lstrip or overlaps)
                and sum(token.content in other for other in contents) == 1
                and self._encoded(token.content) == [index]
            )

        taken = [re.escape(added[n].content) for n in added.keys() & set(chat) if is_taken(n)]
        return re.compile("|".join(taken)) if taken else None


def mlx_lm_suffix(tokenizer, question: str, ignore_chat_template: bool = False) -> list[int]:
    """What mlx-lm's own `generate` feeds after a prompt that `mlx_lm.cache_prompt` saved, but no second
    beginning-of-text token. Raises: SnapKVError: the chat template fails, or leaves the question out."""
    if not ignore_chat_template and tokenizer.has_chat_template:
        options = {"tokenize": False, "add_generation_prompt": True}
        chats = ([{"role": "user", "content": text}] for text in (MARKER, question))
        marked, with_question = (apply_template(tokenizer, chat, **options) for chat in chats)
        if MARKER not in marked:
            raise SnapKVError("this model's chat template drops the question")
        question = with_question[marked.index(MARKER) :]
    return tokenizer.encode(question, add_special_tokens=False)
