"""Prompt caches in files: what a long text cost to read is paid once."""

from .files import FORMAT, SavedPrompt, load, require_writable, save

__all__ = ["FORMAT", "SavedPrompt", "load", "require_writable", "save"]
