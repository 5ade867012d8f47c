"""Get a token's bytes, which may be only part of a character."""

import re
from typing import Any

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    _byte_decoder,
)

BYTE_TOKEN = re.compile("<0x(?P<hex_digits>[0-9A-Fa-f]{2})>")  # e.g. <0xE2>
SENTENCEPIECE_SPACE = "\u2581"
REPLACEMENT_CHARACTER = "\ufffd"


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return a token's bytes, even if the token is only part of a character.

    `decode` returns U+FFFD for such a token.
    """
    text = tokenizer.decode([token])
    piece = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(piece, str) or token in tokenizer.all_special_ids:
        return text.encode()
    byte_token = BYTE_TOKEN.fullmatch(piece)
    if byte_token:
        return bytes.fromhex(byte_token["hex_digits"])
    detokenizer = tokenizer.detokenizer
    if isinstance(detokenizer, SPMStreamingDetokenizer):
        return piece.replace(SENTENCEPIECE_SPACE, " ").encode()
    # Byte-level BPE represents each byte as one printable character.
    byte_of_letter = _byte_decoder()
    is_byte_level = isinstance(detokenizer, BPEStreamingDetokenizer)
    is_part_of_character = REPLACEMENT_CHARACTER in text
    may_be_byte_level = is_byte_level or is_part_of_character
    if may_be_byte_level and all(letter in byte_of_letter for letter in piece):
        return bytes(byte_of_letter[letter] for letter in piece)
    return text.encode()
