"""Conversations as several tests have them."""

SMALL = "snapkv:budget=64,n_sink=4,n_window=32,min_ctx=0"


def ask(conversation, question):
    return [response.token for response in conversation.send(question)]
