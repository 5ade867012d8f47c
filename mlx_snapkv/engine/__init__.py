"""Runs a request, from the first prefill chunk to the last generated token."""
