"""Completions as OpenAI's API knows them: bodies of requests, prompts, constraints and answers."""
