"""OpenAI's APIs: completions, chat completions and responses."""
