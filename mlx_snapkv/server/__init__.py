"""A local server for agents and apps: the APIs they speak, on batches of compressed caches."""
