"""Completions in OpenAI's format: request bodies, prompts, constraints and answers."""
