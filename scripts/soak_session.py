"""An agent's session in a soak test: a conversation that grows, branches, is shortened, and loses its connection."""

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
from soak_apis import API, APIS, Answer, Body, Messages

WORDS = (
    "the file has an old path and the test of a small cache fails when two keys are read in one step so the line "
    "with the name must be changed before the next run or the log shows what the server did not send"
).split()
N_TOKENS = 16  # tokens per answer
N_FORMATTED = 40  # tokens per answer that must be JSON
TOO_LONG = "prompt is too long"  # start of the server's error message
WAIT = 600  # seconds for an answer


@dataclass
class Sent:
    """A request with its response.

    Attributes:
        path, body: the request.
        status: HTTP status.
        answer: the answer, if any.
        error: error message for a status of 400 or above, or for an error within a stream.
    """

    path: str
    body: Body
    status: int
    answer: Answer | None = None
    error: str = ""

    @property
    def has_schema(self) -> bool:
        """Return whether the answer must be JSON."""
        return bool(self.body.keys() & {"response_format", "text", "output_config"})

    @property
    def key(self) -> str:
        """Return a key that is the same for equal requests, whether they stream or not."""
        return self.path + json.dumps({**self.body, "stream": False}, sort_keys=True)


@dataclass
class Session:
    """One agent, with one API and one conversation.

    Attributes:
        number: number of the session, which selects the API.
        seed: random seed for all decisions.
        sent: requests in order.
        counts: how often each action was taken.
    """

    number: int
    seed: int
    sent: list[Sent] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self):
        """Start with an empty history."""
        self._random = random.Random(f"{self.seed} {self.number}")
        self._api: API = list(APIS.values())[self.number % len(APIS)]
        self._history: Messages = []

    def run(self, url: str, until: float) -> None:
        """Work on a server until `time.monotonic` reaches `until`. The server's error messages are stored in `sent`.

        Raises: httpx.HTTPError: a request got no answer.
        """
        # Action -> its relative frequency.
        actions = {self._turn: 12, self._retry: 2, self._branch: 2, self._disconnect: 3}
        with httpx.Client(base_url=url, timeout=WAIT) as client:
            while time.monotonic() < until:
                (action,) = self._random.choices(list(actions), list(actions.values()))
                self.counts[action.__name__.strip("_")] += 1
                action(client)

    def _turn(self, client: httpx.Client) -> None:
        """Send the next user message, or results of calls, and add the answer to the history."""
        self._add_message()
        streams = self._random.random() < 0.6
        self._note(post(client, self._api, self._body(), streams))

    def _retry(self, client: httpx.Client) -> None:
        """Repeat the last request, as a client does after losing its connection."""
        if self.sent:
            body = self.sent[-1].body
            self.sent.append(post(client, self._api, body, streams=not body["stream"]))

    def _branch(self, client: httpx.Client) -> None:
        """Go back to an earlier user message and replace it and everything after it."""
        user_indices = [i for i, message in enumerate(self._history) if message["role"] == "user"]
        if user_indices:
            del self._history[self._random.choice(user_indices) :]
        self._turn(client)

    def _disconnect(self, client: httpx.Client) -> None:
        """Leave in the middle of a stream and repeat the request."""
        self._add_message()
        body = self._body()
        n_lines = self._random.randrange(12)
        with client.stream("POST", self._api.path, json={**body, "stream": True}) as response:
            for _ in zip(range(n_lines), response.iter_lines()):
                pass
        self._note(post(client, self._api, body, streams=True))

    def _note(self, sent: Sent) -> None:
        """Store a request and add its answer to the history.

        If the request failed, shorten the history, because its prompt was probably too long.
        """
        self.sent.append(sent)
        if sent.answer is None:
            self._compact()
            return
        calls = [
            {
                "id": self._call_id(i),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for i, (name, arguments) in enumerate(sent.answer.calls)
        ]
        text = sent.answer.text or ("" if calls else ".")
        message: Body = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = calls
        self._history.append(message)

    def _call_id(self, i: int) -> str:
        """Return a nine-character alphanumeric id for call `i` of a message, which some templates require."""
        return f"{len(self._history):04}{i:05}"

    def _compact(self) -> None:
        """Replace the history with a summary, as agents do when a prompt is too long."""
        self.counts["compact"] += 1
        self._history = [{"role": "user", "content": f"Summary of the work: {self._words(20)}"}]
        self._history.append({"role": "assistant", "content": "Understood."})

    def _add_message(self) -> None:
        """Add results for the last answer's calls or, if it made none, a user message."""
        last_message = self._history[-1] if self._history else {}
        calls = last_message.get("tool_calls", ())
        for call in calls:
            result = {"role": "tool", "tool_call_id": call["id"], "content": self._words(40)}
            self._history.append(result)
        if not calls:
            self._history.append({"role": "user", "content": f"{self._words(16)}?"})

    def _body(self) -> Body:
        """Return the next request's body. Most leave the output free, and the others force a call or JSON."""
        output_fields = [
            {self._api.LIMIT: N_TOKENS},
            {self._api.LIMIT: N_FORMATTED, **self._api.forced()},
            {self._api.LIMIT: N_FORMATTED, **self._api.formatted()},
        ]
        (fields,) = self._random.choices(output_fields, weights=(6, 3, 1))
        body = {"model": "local", "temperature": 0, **self._api.body(self._history)}
        return body | fields

    def _words(self, n_words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=n_words))


def post(client: httpx.Client, api: API, body: Body, streams: bool) -> Sent:
    """Send a request and return it with its answer."""
    body = {**body, "stream": streams}
    if not streams:
        response = client.post(api.path, json=body)
        if response.status_code != 200:
            return Sent(api.path, body, response.status_code, error=response.text)
        return Sent(api.path, body, 200, api.answer(response.json()))
    with client.stream("POST", api.path, json=body) as response:
        if response.status_code != 200:
            response.read()
            return Sent(api.path, body, response.status_code, error=response.text)
        events = list(_events(response.iter_lines()))
    errors = [event for event in events if _is_error(event)]
    if errors:
        return Sent(api.path, body, 200, error=json.dumps(errors[0]))
    return Sent(api.path, body, 200, api.streamed(events))


def _events(lines: Iterator[str]) -> Iterator[Body]:
    """Yield the JSON objects in a stream's lines."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _is_error(event: Body) -> bool:
    """Return whether an event from any API is an error."""
    return bool(event.get("error")) or event.get("type") in ("error", "response.failed")
