"""Where each token starts in an answer's text."""

from mlx_snapkv.server.openai.text_offsets import TextOffsets


def test_a_character_that_tokens_split_counts_for_the_last_of_them():
    text = "a\u2603b\U0001f600"
    pieces = [b"a", b"\xe2\x98", b"\x83b", b"\xf0\x9f", b"\x98", b"\x80", b"end"]
    assert b"".join(pieces).decode() == text + "end"
    offsets = TextOffsets()
    for piece in pieces:
        offsets.add(piece)
    assert offsets.starts == [0, 1, 1, 3, 3, 3, 4]
