"""A server whose model answers as it is told, against templates of several families; what agents and apps send it."""

import json
from contextlib import contextmanager

from acting_server import acting
from agent_templates import FAMILIES

CHAT, TEXT, MESSAGES, RESPONSES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")
)
PATHS = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}


class ScriptedServer:
    """A server whose model says `answer`; `prompt` is what it last read."""

    def __init__(self, served, answers):
        self.served, self.answers, self.post = served, answers, served.post
        self.tokenizer = served.engine.loaded.tokenizer

    @contextmanager
    def family(self, name):
        hf = self.tokenizer._tokenizer
        usual, hf.chat_template = hf.chat_template, FAMILIES.get(name, hf.chat_template)
        try:
            yield self
        finally:
            hf.chat_template = usual

    def ask(self, path, family="chatml", answer="Fine.", **body):
        """The prompt that the model read, the answer's body, and its text."""
        self.answers["next"] = answer
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        with self.family(family):
            found = self.post(path, content=json.dumps({limit: 300} | body))
        assert found.status_code == 200, found.text
        return self.answers["prompt"], found.json()


@contextmanager
def scripted_server():
    answers = {"next": "Fine."}

    def say(prompt):
        answers["prompt"] = prompt
        return answers["next"]

    with acting(say) as served:
        yield ScriptedServer(served, answers)


def user(content="Look."):
    return {"role": "user", "content": content}


ASKED = [user()]


def calls(*written):
    return "".join(f"<tool_call>{text}</tool_call>" for text in written)


OPEN = '{"name": "open", "arguments": {"door": "green"}}'
