"""Decisions about a request before it runs, and estimates of its memory. All of this is arithmetic."""
