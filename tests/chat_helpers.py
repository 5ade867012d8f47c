"""Conversations as several tests have them."""

from mlx_snapkv.demo.questions import is_right

SMALL = "snapkv:budget=64,n_sink=4,n_window=32,obs_window=32,pool=avg,pool_kernel=21,lookahead=4,on_full=keydiff"
RECALLS = ["recall", "recall:8bit", "recall:4bit", "recall:file"]


def ask(conversation, question):
    return [response.token for response in conversation.send(question)]


def all_right(conversation, facts):
    def said(question):
        return "".join(response.text for response in conversation.send(question))

    return [is_right(fact, said(fact.question)) for fact in facts]
