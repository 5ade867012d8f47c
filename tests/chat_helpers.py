"""Helpers for conversation tests."""

from mlx_snapkv import Conversation
from mlx_snapkv.demo.questions import is_right

SMALL = "snapkv:budget=64,n_sink=4,n_window=32,obs_window=32,pool=avg,pool_kernel=21,lookahead=4,on_full=slide"
STORES = ["memory", "8bit", "file"]


def begun(model, haystack, n_turns=0, **options):
    """Return a conversation about a document in which the first `n_turns` facts have been asked about."""
    document, facts = haystack
    conversation = Conversation(*model, **{"max_tokens": 12} | options)
    conversation.attach(document)
    for fact in facts[:n_turns]:
        ask(conversation, fact.question)
    return conversation


def ask(conversation, question):
    return [response.token for response in conversation.send(question)]


def is_answered(conversation, fact):
    return is_right(fact, "".join(response.text for response in conversation.send(fact.question)))


def all_right(conversation, facts):
    return [is_answered(conversation, fact) for fact in facts]
