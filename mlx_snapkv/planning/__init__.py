"""Decisions about a request before it runs, and the memory that it will take; arithmetic only."""
