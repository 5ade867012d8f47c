"""Messages that agent tests send to a server, and model answers."""

from acting_server import CHAT, MESSAGES, RESPONSES

PATHS = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}


def user(content="Look."):
    return {"role": "user", "content": content}


ASKED = [user()]


def calls(*written):
    return "".join(f"<tool_call>{text}</tool_call>" for text in written)


OPEN = '{"name": "open", "arguments": {"door": "green"}}'
