"""The version, for the files of the package that can't ask the root, which imports them."""

__version__ = "0.1.0"
