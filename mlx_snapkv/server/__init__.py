"""A local HTTP server with the APIs of OpenAI and Anthropic, which answers requests in batches of compressed caches."""

BILLING = "x-anthropic-billing-header"  # a header line of Claude Code, with a different number in each request
