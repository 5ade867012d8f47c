"""Requests that a server must refuse with a 4xx, whatever else it does."""

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "The key of"}], "max_tokens": 4}
DEEP = "[" * 100_000 + "]" * 100_000


def chat(**fields):
    return CHAT, {**HELLO, **fields}


def text(**fields):
    return TEXT, {"prompt": "The key of", "max_tokens": 4, **fields}


def message(**fields):
    return chat(messages=[{"role": "user", **fields}])


BAD = {
    "stop of numbers": chat(stop=[1]),
    "a list of lists as prompt": text(prompt=[[1], "a"]),
    "no prompt": (TEXT, {"max_tokens": 4}),
    "empty list as prompt": text(prompt=[]),
    "tokens out of range": text(prompt=[10**9]),
    "top_k beyond the vocabulary": text(top_k=10**6),
    "logit_bias out of range": chat(logit_bias={"99999999": 5}),
    "logit_bias infinite": chat(logit_bias={"5": float("inf")}),
    "max_tokens 0": chat(max_tokens=0),
    "max_tokens a text": chat(max_tokens="many"),
    "NaN temperature": chat(temperature=float("nan")),
    "n": chat(n=1000),
    "logprobs a text": chat(logprobs="yes"),
    "top_logprobs": chat(logprobs=True, top_logprobs=10**6),
    "no messages": (CHAT, {}),
    "messages no list": chat(messages="hi"),
    "a message that is none": chat(messages=[5]),
    "no role": chat(messages=[{"content": "hi"}]),
    "unknown role": message(role="wizard", content="hi"),
    "an image": message(
        content=[{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]
    ),
    "no content": message(),
    "half a pair": message(content="\ud800"),
    "tool calls that are none": message(
        role="assistant", content="hi", tool_calls=[{"function": {"arguments": "{"}}]
    ),
    "tools that are none": chat(tools=[5]),
    "a tool schema that is none": chat(tools=[{"type": "function", "function": 5}]),
    "a forced tool": chat(tool_choice="required"),
    "response_format": chat(response_format={"type": "json_schema", "json_schema": {}}),
    "stream_options": chat(stream=True, stream_options=5),
    "chat_template_kwargs": chat(chat_template_kwargs={"tokenize": False}),
    "a body that is a list": (CHAT, []),
}
RAW = {
    "no JSON": b"{nope",
    "empty": b"",
    "not UTF-8": b'{"messages": "\xff\xfe"}',
    "nested": DEEP.encode(),
    "nested a thousand deep": ('{"a":' * 1000 + "1" + "}" * 1000).encode(),
}

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
BAD_HTTP = [
    HEAD + b"Content-Length: -1\r\n\r\n",
    HEAD + b"Content-Length: many\r\n\r\n",
    HEAD + b"Content-Length: 99999999999\r\n\r\n",
    HEAD + b"\r\n",  # no length
    HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"\x00\x01\x02\x03\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    HEAD + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
    b"BREW /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n\r\n",
]
