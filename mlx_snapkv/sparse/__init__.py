"""Sparse attention: caches keep all entries, and each prompt chunk or answer token reads only a few of them."""
