"""The engine of a model that several Macs hold: rank 0 decides, and all run the same steps."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

from ..batch.groups import request_errors
from ..completions.body import Body
from ..completions.request import CompletionRequest, Defaults, processors_of, sampler_of
from ..errors import SnapKVError, sentence
from ..several.ranks import Ranks
from .api_error import ApiError, log
from .engine import Engine
from .requests import Channel, EngineRequest

LOOK = 0.1  # seconds between two looks for requests, while nothing is to do

SENT = ("prompt", "max_tokens", "stop", "state", "tools", "chat", "ignored")
SAMPLING = set(Body.model_fields) - {"model", "stream"}


def as_message(body: Body, wanted: CompletionRequest, seed: int) -> dict[str, Any]:
    """A request as JSON; `seed` is the one that `asked` got with the body."""
    sampling = body.model_dump(include=SAMPLING, exclude_unset=True)
    return {name: getattr(wanted, name) for name in SENT} | {"sampling": sampling, "seed": seed}


def from_message(message: dict[str, Any], tokenizer, defaults: Defaults) -> CompletionRequest:
    body, size = Body.model_validate(message["sampling"]), len(tokenizer)
    return CompletionRequest(
        **{name: message[name] for name in SENT},
        sampler=sampler_of(body, tokenizer, defaults, size, message["seed"]),
        processors=processors_of(body, size),
    )


class NoChannel:
    """The `Channel` of ranks that have no clients."""

    cancelled = False
    since = 0.0

    def put(self, event: Any) -> None: ...


class SharedEngine(Engine):
    """The engine of one of the ranks, of which rank 0 has the clients.

    Before every step rank 0 sends the others what it alone knows: new requests that it accepted, requests that were
    cancelled, whether the next one may start, how many prompts are still kept, and when to stop. A request that fails
    on one rank ends on all. A step that fails on one leaves the others waiting inside the model, and ends the server.
    """

    def __init__(self, ranks: Ranks, *args: Any, **kwargs: Any):
        self._ranks = ranks
        self._cancelled: set[int] = set()
        self._problems: dict[int, str] = {}
        self._n_taken = 0
        self._stop_received = False
        super().__init__(*args, **kwargs)

    def follow(self) -> None:
        """Take part until rank 0 stops; raises what else ended the server."""
        self._generation_thread.join()
        if self.failure is not None:
            raise self.failure

    def _generate(self) -> None:
        while not self._stop:
            if not (self._running or self._waiting):
                self._wait()
            if self._stop:
                return
            self._take_requests()
            if self._running and not self._stop_received:
                self._step()

    def _wait(self) -> None:
        """Wait until there is something to do, or the server stops."""
        if self._ranks.rank:
            self._ranks.heartbeat.await_call()
            return
        while not (self.requests.qsize() or self._stop):
            with self.requests.not_empty:
                self.requests.not_empty.wait(LOOK)
        if not self._stop:
            self._ranks.heartbeat.call()

    def _take_requests(self) -> None:
        """Follow rank 0, one start at a time."""
        started = True
        while started and not self._stop_received:
            news = self._ranks.first(self._news() if self._ranks.rank == 0 else None)
            assert news is not None
            started = self._follow_news(news)

    def _news(self) -> dict[str, Any]:
        """What the others need to know; new requests already wait here."""
        come = []
        while (given := self._next_request()) is not None:
            channel, body = given
            try:
                come += self._taken(channel, body)
            except Exception as error:
                self._fail(channel, error)
        under_way = [*self._running.values(), *self._waiting]
        self._cancelled = {request.number for request in under_way if request.channel.cancelled}
        starts = bool(self._waiting) and self._may_start(self._waiting[0])
        n_known = len(self.prefixes)
        return {
            "come": come,
            "cancelled": list(self._cancelled),
            "starts": starts,
            "n_known": n_known,
        }

    def _taken(self, channel: Channel, body: Body) -> list[dict[str, Any]]:
        """A request that now waits, as the others get it; none if it was cancelled before."""
        seed, n_waiting = secrets.randbits(64), len(self._waiting)
        self._take(channel, body, seed)
        if len(self._waiting) == n_waiting:
            return []
        request = self._waiting[-1]
        self._n_taken += 1
        request.number = self._n_taken
        more = {"number": request.number, "checkpoints": request.checkpoints}
        return [as_message(body, request.asked, seed) | more]

    def _follow_news(self, news: dict[str, Any]) -> bool:
        """Follow rank 0; whether a request was started, and another one may be."""
        if "stop" in news:
            self._stop = self._stop_received = True
            return False
        if self._ranks.rank:
            self._waiting.extend(map(self._received, news["come"]))
            self._cancelled = set(news["cancelled"])
            self.prefixes.trim_to(n_sequences=news["n_known"])
        if news["starts"]:
            self._start_on_all(self._waiting.popleft())
        return news["starts"]

    def _received(self, message: dict[str, Any]) -> EngineRequest:
        number, wanted = message["number"], None
        try:
            wanted = from_message(message, self.loaded.tokenizer, self.defaults)
        except Exception as error:  # rank 0 learns of it at the start
            self._problems[number] = sentence(error)
        channel: Any = NoChannel()
        return EngineRequest(channel, wanted, None, None, message["checkpoints"], number)  # type: ignore[arg-type]

    def _start_on_all(self, request: EngineRequest) -> None:
        """Start a request, unless some rank can't."""
        problems = self._ranks.gather(self._problems.pop(request.number, None))
        found = [f"rank {rank}: {why}" for rank, why in enumerate(problems) if why is not None]
        if found:
            self._fail(request.channel, RuntimeError(found[0]))
            return
        try:
            self._start(request)
        except request_errors(self.loaded.model) as error:
            self._fail(request.channel, error)

    def _known(self, prompt: list[int]) -> tuple[list | None, int]:
        """The prefix that all ranks know; none, unless it is the same on all."""
        try:
            found = super()._known(prompt)
        except Exception as error:
            log.warning("a prefix is not used: %s", sentence(error))
            found = None, 0
        return found if len(set(self._ranks.gather(found[1]))) == 1 else (None, 0)

    def _trim_prefixes(self) -> None:
        if self._ranks.rank == 0:  # the others keep as many prefixes
            super()._trim_prefixes()

    def _retry(self, request: EngineRequest) -> bool:
        return False  # on other ranks it may not have failed so

    def _is_cancelled(self, request: EngineRequest) -> bool:
        return request.number in self._cancelled

    def _fail(self, channel: Channel, error: Exception) -> None:
        if self._ranks.rank == 0:
            super()._fail(channel, error)

    def _close(self) -> None:
        if self._ranks.rank == 0:
            super()._close()

    def _fail_all(self, error: Exception) -> None:
        """The ranks have diverged: the server ends."""
        self.failure, self._stop = error, True
        ends = ApiError(500, f"the server ends: {sentence(error)}", kind="server_error")
        running, self._running = self._running, {}
        for request in running.values():
            self._fail(request.channel, ends)
        if self.server is not None:
            self.server.should_exit = True

    def _end_all(self, error: Exception) -> None:
        if self._ranks.rank == 0 and self.failure is None:
            self._ranks.heartbeat.call()
            self._ranks.first({"stop": True})
            with contextlib.suppress(SnapKVError):  # a rank has gone already
                for _ in range(1, self._ranks.size):
                    self._ranks.heartbeat.await_call()  # which each does once it knows
        elif self._stop_received:
            self._ranks.heartbeat.call()
        super()._end_all(error)

    def _share_request(self, request: Any) -> Any:
        return request  # mlx-lm would send it to the others at once
