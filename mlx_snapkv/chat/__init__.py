"""Multi-turn conversations with compressed caches. They can be saved to files."""
