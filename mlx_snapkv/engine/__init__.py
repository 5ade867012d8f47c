"""One request, from its first chunk to its last token."""
