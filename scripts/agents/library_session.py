"""Hold a conversation with the server through a client library, in an environment without mlx-snapkv.

    python library_session.py CLIENT SERVER < turns.json     # prints each turn's answer as a line of JSON

Each turn is a text to send. Commands that the model calls are run, and their results are sent, until the model answers
with text. Every second turn is streamed.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

MAX_TOKENS = 1000
SYSTEM = "You are an agent. Run commands with your tool."
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "for a shell"}},
    "required": ["command"],
    "additionalProperties": False,
}
FUNCTION = {"name": "run", "description": "Run a command.", "parameters": PARAMETERS}
IN_CHAT = {"type": "function", "function": FUNCTION}
IN_RESPONSES = {"type": "function", "strict": True, **FUNCTION}
IN_MESSAGES = {"name": "run", "description": "Run a command.", "input_schema": PARAMETERS}

Call = tuple[str, dict[str, Any]]  # id, arguments
Answer = tuple[str, list[Call]]  # text, tool calls


def _openai(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


class OpenAIChat:
    """A conversation through openai's chat completions.

    All conversation classes have these methods: `say` adds a message, `give` adds the result of a call, and `answer`
    requests the next answer.
    """

    def __init__(self, url: str):
        """Start a conversation with the server at `url`."""
        self.client = _openai(url)
        self.messages: list[Any] = [{"role": "system", "content": SYSTEM}]

    def say(self, text: str) -> None:
        """Add a user message."""
        self.messages.append({"role": "user", "content": text})

    def give(self, call_id: str, text: str, failed: bool) -> None:
        """Add the result of a call. This API can't report that a call `failed`."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def answer(self, streamed: bool) -> Answer:
        """Request the next answer, add it to the conversation, and return its text and calls."""
        request = {"model": "local", "tools": [IN_CHAT], "max_completion_tokens": MAX_TOKENS}
        if streamed:
            usage = {"stream_options": {"include_usage": True}}
            request |= {"messages": self.messages, **usage}
            with self.client.chat.completions.stream(**request) as stream:
                response = stream.get_final_completion()
        else:
            response = self.client.chat.completions.create(messages=self.messages, **request)
        assert response.usage.completion_tokens > 0
        message = response.choices[0].message
        self.messages.append(message)
        calls = [(c.id, json.loads(c.function.arguments)) for c in message.tool_calls or []]
        return message.content or "", calls


class OpenAIResponses:
    """A conversation through openai's responses."""

    def __init__(self, url: str):
        """Start a conversation with the server at `url`."""
        self.client = _openai(url)
        self.items: list[Any] = []

    def say(self, text: str) -> None:
        """Add a user message."""
        self.items.append({"role": "user", "content": text})

    def give(self, call_id: str, text: str, failed: bool) -> None:
        """Add the result of a call. This API can't report that a call `failed`."""
        output = {"type": "function_call_output", "call_id": call_id, "output": text}
        self.items.append(output)

    def answer(self, streamed: bool) -> Answer:
        """Request the next answer, add its items to the conversation, and return its text and calls."""
        request = {"model": "local", "instructions": SYSTEM, "max_output_tokens": MAX_TOKENS}
        request |= {"tools": [IN_RESPONSES], "store": False, "input": self.items}
        if streamed:
            with self.client.responses.stream(**request) as stream:
                response = stream.get_final_response()
        else:
            response = self.client.responses.create(**request)
        assert response.status == "completed" and response.usage.output_tokens > 0
        self.items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        return response.output_text, [(c.call_id, json.loads(c.arguments)) for c in calls]


class Anthropic:
    """A conversation through anthropic's messages."""

    def __init__(self, url: str):
        """Start a conversation with the server at `url`."""
        import anthropic

        self.client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
        self.messages: list[Any] = []

    def say(self, text: str) -> None:
        """Add a text to the user message."""
        self._add({"type": "text", "text": text})

    def give(self, call_id: str, text: str, failed: bool) -> None:
        """Add the result of a call to the user message."""
        about = {"tool_use_id": call_id, "content": text, "is_error": failed}
        self._add({"type": "tool_result", **about})

    def _add(self, block: dict[str, Any]) -> None:
        """Add a block to the user message. At the start and after each answer, begin a new one."""
        if not self.messages or self.messages[-1]["role"] != "user":
            self.messages.append({"role": "user", "content": []})
        self.messages[-1]["content"].append(block)

    def answer(self, streamed: bool) -> Answer:
        """Request the next answer, check the server's token counts, and return its text and calls."""
        caching = {"cache_control": {"type": "ephemeral"}}
        system = [{"type": "text", "text": SYSTEM, **caching}]
        tools = [IN_MESSAGES | caching]
        request = {"model": "local", "system": system, "tools": tools, "messages": self.messages}
        n_tokens = self.client.messages.count_tokens(**request).input_tokens
        if streamed:
            with self.client.messages.stream(max_tokens=MAX_TOKENS, **request) as stream:
                response = stream.get_final_message()
        else:
            response = self.client.messages.create(max_tokens=MAX_TOKENS, **request)
        assert n_tokens == response.usage.input_tokens + response.usage.cache_read_input_tokens
        self.messages.append({"role": "assistant", "content": response.content})
        calls = [(block.id, block.input) for block in response.content if block.type == "tool_use"]
        texts = [block.text for block in response.content if block.type == "text"]
        return "".join(texts), calls


class LiteLLM(OpenAIChat):
    """A conversation through litellm, with the API that `model` selects."""

    def __init__(self, url: str, model: str = "openai/local"):
        """Start a conversation. The prefix of `model` selects the API."""
        super().__init__(url)
        self.options = {"model": model, "api_key": "any", "max_tokens": MAX_TOKENS}
        self.options["api_base"] = f"{url}/v1" if model.startswith("openai") else url

    def answer(self, streamed: bool) -> Answer:
        """Request the next answer, add it to the conversation, and return its text and calls."""
        import litellm

        request = {**self.options, "tools": [IN_CHAT], "messages": self.messages}
        response = litellm.completion(stream=streamed, **request)
        if streamed:
            response = litellm.stream_chunk_builder(list(response), messages=self.messages)
        message = response.choices[0].message
        self.messages.append(message.model_dump())
        calls = [(c.id, json.loads(c.function.arguments)) for c in message.tool_calls or []]
        return message.content or "", calls


class LangChain:
    """A conversation through langchain-openai, with chat completions or responses."""

    def __init__(self, url: str, by_responses: bool = False):
        """Start a conversation, with responses or with chat completions."""
        from langchain_core.messages import SystemMessage
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(
            model="local",
            base_url=f"{url}/v1",
            api_key="any",
            max_tokens=MAX_TOKENS,
            max_retries=0,
            use_responses_api=by_responses,
            stream_usage=True,
        )
        self.model = model.bind_tools([IN_CHAT])
        self.messages: list[Any] = [SystemMessage(SYSTEM)]

    def say(self, text: str) -> None:
        """Add a user message."""
        from langchain_core.messages import HumanMessage

        self.messages.append(HumanMessage(text))

    def give(self, call_id: str, text: str, failed: bool) -> None:
        """Add the result of a call."""
        from langchain_core.messages import ToolMessage

        status = "error" if failed else "success"
        self.messages.append(ToolMessage(text, tool_call_id=call_id, status=status))

    def answer(self, streamed: bool) -> Answer:
        """Request the next answer, add it to the conversation, and return its text and calls."""
        if streamed:
            chunks = list(self.model.stream(self.messages))
            response = chunks[0]
            for chunk in chunks[1:]:
                response = response + chunk
        else:
            response = self.model.invoke(self.messages)
        assert response.usage_metadata["output_tokens"] > 0
        self.messages.append(response)
        return response.text, [(call["id"], call["args"]) for call in response.tool_calls]


CLIENTS: dict[str, Callable[[str], Any]] = {
    "openai /v1/chat/completions": OpenAIChat,
    "openai /v1/responses": OpenAIResponses,
    "anthropic /v1/messages": Anthropic,
    "litellm /v1/chat/completions": LiteLLM,
    "litellm /v1/messages": lambda url: LiteLLM(url, "anthropic/local"),
    "langchain-openai /v1/chat/completions": LangChain,
    "langchain-openai /v1/responses": lambda url: LangChain(url, by_responses=True),
}


def _run(command: str) -> tuple[str, bool]:
    """Run a command. Return its output, and whether it failed."""
    process = subprocess.run(command, shell=True, capture_output=True, text=True)
    has_failed = process.returncode != 0
    return process.stdout + process.stderr, has_failed


def main() -> None:
    """Send the messages from stdin, run the model's calls, and print each answer's text as JSON."""
    client, url = sys.argv[1:]
    session = CLIENTS[client](url)
    for number, message in enumerate(json.load(sys.stdin)):
        is_streamed = number % 2 == 1
        session.say(message)
        text, calls = session.answer(is_streamed)
        while calls:
            results = [(call_id, *_run(arguments["command"])) for call_id, arguments in calls]
            for result in reversed(results):  # a client may send results in any order
                session.give(*result)
            text, calls = session.answer(is_streamed)
        print(json.dumps(text), flush=True)


if __name__ == "__main__":
    main()
