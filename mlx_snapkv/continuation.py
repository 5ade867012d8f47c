"""What is fed after a prompt that mlx-lm saved, whose own tokens its file does not tell."""

from __future__ import annotations


def mlx_lm_suffix(tokenizer, question: str, ignore_chat_template: bool = False) -> list[int]:
    """What mlx-lm's own `generate` feeds after a prompt saved by `mlx_lm.cache_prompt`.

    Without a chat template there is no second beginning-of-text token, which mlx-lm would put in.
    """
    if not ignore_chat_template and tokenizer.has_chat_template:
        marker = "<query>"
        messages = [{"role": "user", "content": marker}]
        around = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        messages[0]["content"] = question
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        question = whole[around.index(marker) :]
    return tokenizer.encode(question, add_special_tokens=False)
