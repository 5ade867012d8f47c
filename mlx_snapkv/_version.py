"""The package version, in a module of its own to avoid circular imports."""

__version__ = "0.1.0"
