"""What is fed after a prompt that mlx-lm saved, whose own tokens its file does not tell."""

from typing import Any

from ..errors import SnapKVError

MARKER = "<query>"


def mlx_lm_suffix(tokenizer, question: str, ignore_chat_template: bool = False) -> list[int]:
    """What mlx-lm's own `generate` feeds after a prompt saved by `mlx_lm.cache_prompt`.

    Without a chat template there is no second beginning-of-text token, which mlx-lm would put in.

    Raises:
        SnapKVError: the chat template fails, or leaves the question out.
    """
    if not ignore_chat_template and tokenizer.has_chat_template:
        options = {"tokenize": False, "add_generation_prompt": True}
        chats = ([{"role": "user", "content": text}] for text in (MARKER, question))
        marked, asked = (rendered(tokenizer, chat, **options) for chat in chats)
        if MARKER not in marked:
            raise SnapKVError("this model's chat template leaves the question out")
        question = asked[marked.index(MARKER) :]
    return tokenizer.encode(question, add_special_tokens=False)


def rendered(tokenizer, messages: list[dict[str, str]], **options: Any) -> Any:
    """What a chat template makes of messages; SnapKVError if it fails."""
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # templates are code of the model's authors
        raise SnapKVError(f"the chat template refused the conversation: {error}") from error
