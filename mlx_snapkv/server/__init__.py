"""A local server for agents and apps: the APIs they speak, on batches of compressed caches."""

BILLING = "x-anthropic-billing-header"  # Claude Code's, with a number drawn for each request
