"""A local HTTP server with OpenAI's and Anthropic's APIs. It answers requests in batches, with compressed caches."""

BILLING = "x-anthropic-billing-header"  # a Claude Code header, different in every request
