"""The engine of a model that several Macs hold: rank 0 decides, and all run the same steps."""

from __future__ import annotations

import contextlib
from typing import Any

from ..completions.body import Body, CompletionBody
from ..completions.request import completion_request
from ..errors import SnapKVError, sentence
from ..several.ranks import Ranks
from .api_error import ApiError, log
from .engine import Engine
from .requests import EngineRequest

SENT = {*Body.model_fields, "full_cache"} - {"model", "stream"}


class NoChannel:
    """The `Channel` of ranks that have no clients."""

    cancelled = False
    since = 0.0

    def put(self, event: Any) -> None: ...


class SharedEngine(Engine):
    """The engine of one of the ranks, of which rank 0 has the clients.

    Before every step rank 0 sends the others what it alone knows: new requests that it accepted, requests that were
    cancelled, whether the next one may start, how many prompts are still kept, and when to stop. A step that fails on
    one rank leaves the others waiting inside the model, and ends the server.
    """

    _retries = False  # on other ranks a request may not have failed so

    def __init__(self, ranks: Ranks, *args: Any, **kwargs: Any):
        self._ranks = ranks
        self._cancelled: set[int] = set()
        self._stop_received = False
        super().__init__(*args, **kwargs)

    def follow(self) -> None:
        """Take part until rank 0 stops; raises what else ended the server."""
        self._generation_thread.join()
        if self.failure is not None:
            raise self.failure

    def _wait(self) -> None:
        """Wait until there is something to do, or the server stops."""
        if self._ranks.rank:
            self._ranks.heartbeat.await_call()
            return
        while not (self.requests.qsize() or self._stop):
            super()._wait()
        if not self._stop:
            self._ranks.heartbeat.call()

    def _next_to_start(self) -> EngineRequest | None:
        """The next request that rank 0 starts, once all ranks know what it knows."""
        news = self._ranks.first(self._news() if self._ranks.rank == 0 else None)
        assert news is not None
        if "stop" in news:
            self._stop = self._stop_received = True
            return None
        if self._ranks.rank:
            self._waiting.extend(map(self._received, news["come"]))
            self.prefixes.trim_to(n_sequences=news["n_known"])
        self._cancelled = set(news["cancelled"])
        return self._waiting.popleft() if news["starts"] else None

    def _news(self) -> dict[str, Any]:
        """What the others need to know."""
        n_waiting = len(self._waiting)
        self._take_requests()
        under_way = [*self._running.values(), *self._waiting]
        self._cancelled = {r.number for r in under_way if r.channel.cancelled}
        return {
            "come": [self._sent(r) for r in list(self._waiting)[n_waiting:]],
            "cancelled": list(self._cancelled),
            "starts": self._may_start(),
            "n_known": len(self.prefixes),
        }

    def _sent(self, request: EngineRequest) -> dict[str, Any]:
        """A request as the others get it: the tokens, and what decides which ones follow."""
        body = request.body.model_dump(include=SENT, exclude_unset=True)
        return {
            "body": body | {"prompt": request.asked.prompt},
            "seed": request.seed,
            "checkpoints": request.checkpoints,
            "number": request.number,
        }

    def _received(self, message: dict[str, Any]) -> EngineRequest:
        body, seed = CompletionBody.model_validate(message["body"]), message["seed"]
        asked = completion_request(body, self.loaded.tokenizer, self.defaults, seed)
        asked = self._admission.limited(asked)
        channel: Any = NoChannel()
        own = message["checkpoints"], message["number"]
        return EngineRequest(channel, body, seed, asked, None, *own)

    def _known(self, prompt: list[int]) -> tuple[list | None, int]:
        """The prefix that all ranks know; none, unless it is the same on all."""
        try:
            found = super()._known(prompt)
        except Exception as error:
            log.warning("a prefix is not used: %s", sentence(error))
            found = None, 0
        return found if len(set(self._ranks.gather(found[1]))) == 1 else (None, 0)

    def _step(self) -> None:
        if not self._stop_received:
            super()._step()

    def _trim_prefixes(self) -> None:
        if self._ranks.rank == 0:  # the others keep as many prefixes
            super()._trim_prefixes()

    def _is_cancelled(self, request: EngineRequest) -> bool:
        return request.number in self._cancelled

    def _fail_all(self, error: Exception) -> None:
        """The ranks have diverged: the server ends."""
        self.failure, self._stop = error, True
        ends = ApiError(500, f"the server ends: {sentence(error)}", kind="server_error")
        while self._running:
            self._running.popitem()[1].channel.put(ends)
        if self.server is not None:
            self.server.should_exit = True

    def _end_all(self) -> None:
        if self._ranks.rank == 0 and self.failure is None:
            self._ranks.heartbeat.call()
            self._ranks.first({"stop": True})
            with contextlib.suppress(SnapKVError):  # a rank has gone already
                for _ in range(1, self._ranks.size):
                    self._ranks.heartbeat.await_call()  # which each does once it knows
        elif self._stop_received:
            self._ranks.heartbeat.call()
        super()._end_all()

    def _share_request(self, request: Any) -> Any:
        return request  # mlx-lm would send it to the others at once
