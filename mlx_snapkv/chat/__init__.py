"""Multi-turn conversations that have compressed caches and can be saved to files."""
