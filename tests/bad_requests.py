"""Requests that a server must reject with a 4xx status."""

CHAT, TEXT, MESSAGES, RESPONSES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")
)
HELLO = {"messages": [{"role": "user", "content": "The key of"}], "max_tokens": 4}
FUNCTION = {"type": "function", "name": "open", "parameters": {"most": float("inf")}}
LISTED = {"name": "open", "parameters": [], "input_schema": []}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
DEEP = "[" * 100_000 + "]" * 100_000
REFUSAL = "{{ raise_exception('\ud800') }}"
TEXT_NAME = {"type": "function", "function": "open"}


def chat(words, **fields):
    return CHAT, {**HELLO, **fields}, words


def schema(words, given):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}
    return chat(words, response_format=wanted)


def text(words, **fields):
    return TEXT, {"prompt": "The key of", "max_tokens": 4, **fields}, words


def said(words, role="user", **fields):
    return chat(words, messages=[{"role": role, **fields}])


def anthropic(words, **fields):
    return MESSAGES, {**HELLO, **fields}, words


def response(words, **fields):
    return RESPONSES, {"input": "The key of", "max_output_tokens": 4, **fields}, words


# The path, the body, and words of the error.
BAD = [
    chat("stop.0 should be a valid string, got 1", stop=[1]),
    text("prompt should be a valid string, got [[1], 'a']", prompt=[[1], "a"]),
    text("prompt must have token ids from 0 to", prompt=[10**9]),
    text("top_k must be less than the vocabulary's", top_k=10**6),
    chat("logit_bias must have token ids from 0 to", logit_bias={"99999999": 5}),
    chat("logit_bias.5 should be a finite number", logit_bias={"5": float("inf")}),
    chat("max_tokens should be greater than or equal to 1, got 0", max_tokens=0),
    chat("n should be less than or equal to 8", n=1000),
    (CHAT, {}, "messages is missing"),
    chat("messages must not be empty", messages=[]),
    chat("messages.0 should be a valid object", messages=[5]),
    said("messages.0.content has an image, and this model reads text", content=[IMAGE]),
    said("messages.0.content must not be empty"),
    said("messages.0.role should be one of", "wizard", content="hi"),
    chat("messages.0.role is missing", messages=[{"content": "hi"}]),
    said("messages.0.content should be texts or parts, got 7", content=7),
    chat("takes no tools", tools=[{"type": "function", "function": 5}]),  # the template has none
    chat("response_format.type should be 'text', 'json_object' or", response_format={"type": "x"}),
    chat("response_format needs a schema", response_format={"type": "json_schema"}),
    schema("json_schema.schema should be a valid object", 5),
    schema("response_format's schema can't be enforced: unsupported keywords", {"not": {}}),
    schema("response_format's schema can't be enforced: Unsatisfiable", False),
    schema("can't be enforced", {"minimum": "\ud800"}),
    schema("has 1001 optional properties", {"properties": {str(n): {} for n in range(1001)}}),
    chat("tool_choice should be 'auto', 'none', 'required'", tool_choice="any"),
    chat("tool_choice.function is missing", tool_choice={"type": "function"}),
    chat("tool_choice asks for a call, but there are no tools", tool_choice="required"),
    chat("tool_choice.type should be 'auto', 'none'", tool_choice={"type": []}),
    chat("tool_choice should name a tool as in", tool_choice=TEXT_NAME),
    chat("leave the prompt a list of tokens", chat_template_kwargs={"tokenize": False}),
    chat("the chat template or tokenizer failed", chat_template_kwargs={"self": []}),
    chat("TemplateError: \ufffd", chat_template_kwargs={"chat_template": REFUSAL}),
    chat("audio is not supported: drop the field", audio={"voice": "x"}),
    chat("temperature should be a valid number, got 'hot'", temperature="hot"),
    chat("presence_penalty should be less than or equal to 100", presence_penalty=1e300),
    chat("repetition_penalty should be 0, or from 0.01", repetition_penalty=1e-300),
    response("instructions.content has an image", instructions=[IMAGE]),
    (CHAT, [], "body must be an object, got []"),
    (CHAT, None, "the body is empty or null: send a JSON object"),
    anthropic("0.content has an image", messages=[{"role": "user", "content": [IMAGE]}]),
    anthropic("system.content has an image", system=[IMAGE]),
    anthropic("tools.0.input_schema is missing", tools=[{"name": "open"}]),
    anthropic("tools.0.input_schema should be a valid object, got []", tools=[LISTED]),
    anthropic("messages.0.role should be one of", messages=[{"role": 5, "content": "a"}]),
    anthropic("tool_choice.type should be 'auto', 'none', 'any'", tool_choice={"type": "x"}),
    anthropic("tool_choice.name is missing", tool_choice={"type": "tool"}),
    anthropic("tool_choice asks for a call, but there are", tool_choice={"type": "any"}),
    anthropic(
        "output_config.format.type should be 'text'", output_config={"format": {"type": "x"}}
    ),
    response("input must be text or a list", input=5),
    response(
        "input.0 refers to an earlier response", input=[{"type": "item_reference", "id": "a"}]
    ),
    response("reasoning.effort should be a finite number", reasoning={"effort": float("nan")}),
    response("tool_choice.a should be a finite number", tool_choice={"a": float("inf")}),
    response("previous_response_id can't be honoured", previous_response_id="resp_1"),
    response("tools.0.parameters.most should be a finite number", tools=[FUNCTION]),
    response("tools.0.parameters should be a valid object", tools=[{**FUNCTION, **LISTED}]),
    response("text.format needs a schema", text={"format": {"type": "json_schema"}}),
]
RAW = [
    b"{nope",
    b'{"messages": "\xff\xfe"}',
    DEEP.encode(),
    f'{{"messages": {DEEP}}}'.encode(),
    ('{"a":' * 1000 + "1" + "}" * 1000).encode(),
    b'{"seed": %s}' % (b"9" * 5000),
]

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
BAD_HTTP = [
    HEAD + b"Content-Length: many\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"\x00\x01\x02\x03\r\n\r\n",
    b"BREW /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n\r\n",
]
