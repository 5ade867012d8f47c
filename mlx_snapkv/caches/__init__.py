"""Where entries live."""
