"""Eviction: policies that choose which entries to keep, and the caches that evict the rest."""
