"""Bodies of the OpenAI API: what a request asks of a model, and what an answer is given in."""
