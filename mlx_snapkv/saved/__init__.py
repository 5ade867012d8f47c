"""Save and load prompt caches, so that a long text has to be read only once."""

from .files import FORMAT, SavedPrompt, load, require_writable, save

__all__ = ["FORMAT", "SavedPrompt", "load", "require_writable", "save"]
