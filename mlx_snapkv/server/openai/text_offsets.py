"""Find where tokens start in the text of an answer."""

import codecs


class TextOffsets:
    """Finds the character of an answer's text at which each token starts.

    A character may be split over several tokens. It belongs to the token that completes it.

    Attributes:
        starts: number of characters before each token.
    """

    def __init__(self) -> None:
        """Start before the first token."""
        self.starts: list[int] = []
        self._n_characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def add(self, data: bytes) -> None:
        """Append the bytes of the next token."""
        self.starts.append(self._n_characters)
        self._n_characters += len(self._decoder.decode(data))
