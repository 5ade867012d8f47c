"""Sparse attention: all entries stay, and chunks of the prompt and tokens of the answer read few of them."""
