"""Saves and loads prompt caches, so that a long text only has to be read once."""

from .files import FORMAT, SavedPrompt, load, require_writable, save

__all__ = ["FORMAT", "SavedPrompt", "load", "require_writable", "save"]
