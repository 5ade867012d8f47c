"""Multi-turn conversations with compressed caches, which can be saved to files."""
