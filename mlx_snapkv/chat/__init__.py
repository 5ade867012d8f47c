"""Conversations: messages, caches between turns, and saved files."""
