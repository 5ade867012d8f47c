"""Find where each token starts in an answer's text."""

import codecs


class TextOffsets:
    """Finds the character offset at which each token starts in an answer's text.

    A character may be split across several tokens. It then belongs to the token that completes it.

    Attributes:
        starts: number of characters before each token.
    """

    def __init__(self) -> None:
        """Start with no tokens."""
        self.starts: list[int] = []
        self._n_characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def add(self, data: bytes) -> None:
        """Append the start of the next token. `data` is the token's bytes."""
        self.starts.append(self._n_characters)
        self._n_characters += len(self._decoder.decode(data))
