"""OpenAI's APIs: Completions, Chat Completions and Responses."""
