"""Eviction: policies that choose which entries stay, and caches for these entries."""
