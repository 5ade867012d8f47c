"""Get the bytes of single tokens, which may be only part of a character."""

import re
from typing import Any

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    _byte_decoder,
)

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return a token's bytes, even if they are only part of a character, for which `decode` returns U+FFFD."""
    text = tokenizer.decode([token])
    piece = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(piece, str) or token in tokenizer.all_special_ids:
        return text.encode()
    byte_token = BYTE_TOKEN.fullmatch(piece)
    if byte_token:
        return bytes([int(byte_token[1], 16)])
    detokenizer = tokenizer.detokenizer
    if isinstance(detokenizer, SPMStreamingDetokenizer):
        return piece.replace("\u2581", " ").encode()  # SentencePiece writes a space as U+2581
    # Byte-level BPE writes each byte as one letter.
    byte_of_letter = _byte_decoder()
    is_byte_level = isinstance(detokenizer, BPEStreamingDetokenizer) or "\ufffd" in text
    if is_byte_level and all(letter in byte_of_letter for letter in piece):
        return bytes(byte_of_letter[letter] for letter in piece)
    return text.encode()
