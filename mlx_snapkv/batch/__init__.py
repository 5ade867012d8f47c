"""Answer many requests at once, each with a compressed cache of its own."""
