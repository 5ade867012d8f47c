"""The bytes of single tokens, of which several may be needed for a letter."""

import re
from typing import Any

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    _byte_decoder,
)

BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """A token's own bytes; without U+FFFD, by which `decode` shows a part of a letter."""
    text = tokenizer.decode([token])
    piece = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(piece, str) or token in tokenizer.all_special_ids:
        return text.encode()
    if byte := BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    detokenizer = tokenizer.detokenizer
    if isinstance(detokenizer, SPMStreamingDetokenizer):
        return piece.replace("\u2581", " ").encode()
    bytes_of = _byte_decoder()
    is_bytes = isinstance(detokenizer, BPEStreamingDetokenizer) or "\ufffd" in text
    if is_bytes and all(letter in bytes_of for letter in piece):
        return bytes(bytes_of[letter] for letter in piece)
    return text.encode()
