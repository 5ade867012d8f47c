"""A local HTTP server with OpenAI's and Anthropic's APIs.

It answers requests in batches, optionally with cache compression or sparse attention.
"""

BILLING = "x-anthropic-billing-header"  # name of a line in Claude Code's system prompts that changes with every request
