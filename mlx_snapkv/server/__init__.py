"""A local HTTP server with OpenAI's and Anthropic's APIs.

It answers requests in batches, optionally with cache compression or sparse attention.
"""

# Claude Code's system prompts start with a line of this name. The line is different in every request.
BILLING = "x-anthropic-billing-header"
