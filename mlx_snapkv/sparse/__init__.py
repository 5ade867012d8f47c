"""Sparse attention: caches keep all entries, and each answer token, or prompt chunk, reads only a few of them."""
