"""Conversations: messages, memory between turns, and their files."""
