"""Eviction: policies, and the caches that hold the entries that a policy keeps."""
