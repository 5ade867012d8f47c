"""OpenAI-style completions: request bodies, prompts, constrained decoding and answers."""
