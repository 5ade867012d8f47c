"""The package version, in a separate module to avoid circular imports."""

__version__ = "0.1.0"
