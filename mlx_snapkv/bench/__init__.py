"""What a user measures on a machine of theirs: decoding and reading by context length."""
