"""Conversations: their messages, their caches between turns, and their saved files."""
