"""Answer an HTTP request: pass it to the engine, and turn the engine's events into a response."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from ..completions.body import Body
from ..completions.contents import replace_surrogates
from .api_error import ApiError, as_api_error
from .changing_lines import drop_volatile_lines
from .formatter import ResponseFormatter
from .requests import Accepted, EngineRequest, Event, Finished

KEEP_ALIVE_SECONDS = 5.0  # seconds without an event before a keep-alive is sent
POLL_SECONDS = 0.5  # seconds between checks that the client and the engine are still there


def model_name(request: Request, body: Any) -> str:
    """Return the model name for the response: the body's or, by default, the name that the model was loaded under."""
    return replace_surrogates(body.model or request.app.state.engine.loaded.names[0])


async def respond(
    request: Request, answer_bodies: Sequence[Body], formatter: ResponseFormatter, stream: bool
) -> Response:
    """Return the response to a request.

    Args:
        request: the HTTP request. Its application's state has the engine.
        answer_bodies: one completion body per answer.
        formatter: formats the answers for the client's API.
        stream: whether to respond with server-sent events instead of JSON.

    Raises: Exception: too many answers were requested, or an answer failed before the response started.
    """
    state = request.app.state
    n_answers = len(answer_bodies)
    max_answers = state.engine.limits.max_requests
    if n_answers > max_answers:
        raise ApiError(
            400, f"{n_answers} answers at once are more than {max_answers}: ask for fewer"
        )
    for answer_body in answer_bodies:
        drop_volatile_lines(answer_body, state.settings.volatile_headers)
        state.changing_lines.compare(answer_body)
    events = _events(request, answer_bodies)
    first_chunks: list[bytes] = []
    n_accepted = 0
    async for index, event in events:
        # Encode before the response starts, because text that can't be encoded is the client's mistake (status 400).
        first_chunks += [text.encode() for text in formatter.handle(index, event)]
        if isinstance(event, Accepted):
            n_accepted += 1
        # Once the stream has started, an error can't have its own HTTP status. So start it only when all requests have
        # started, or when all are accepted but some have to wait.
        all_started = len(formatter.started) == n_answers
        some_wait = event is None and n_accepted == n_answers
        if stream and (all_started or some_wait):
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            chunks = _stream(first_chunks, events, formatter, request.state.request_id)
            return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)
    return JSONResponse(formatter.response_body())


async def _events(
    request: Request, bodies: Sequence[Body]
) -> AsyncIterator[tuple[int, Event | None]]:
    """Submit the bodies to the engine, and yield (answer index, event) pairs until all answers are finished.

    An event of None means that nothing has happened for a while. When the generator ends, unfinished requests are
    cancelled.

    Raises: Exception: a request was rejected, failed or timed out; ClientDisconnect: the client has left.
    """
    engine = request.app.state.engine
    loop = asyncio.get_running_loop()
    queue = asyncio.Queue[tuple[int, Event]]()

    def put(index: int, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # raised if the event loop is closed
            loop.call_soon_threadsafe(queue.put_nowait, (index, event))

    arrival = last_check = time.monotonic()
    n_unfinished = len(bodies)
    with contextlib.ExitStack() as stack:
        engine_requests = [
            EngineRequest(body, partial(put, index), request.state.request_id)
            for index, body in enumerate(bodies)
        ]
        for engine_request in engine_requests:
            stack.enter_context(engine.answering(engine_request))
        for engine_request in engine_requests:
            await asyncio.to_thread(engine.submit, engine_request)
        while n_unfinished > 0:
            now = time.monotonic()
            if now > last_check + POLL_SECONDS:
                last_check = now
                await _require_ongoing(request, seconds=now - arrival)
            try:
                index, event = await asyncio.wait_for(queue.get(), POLL_SECONDS)
            except asyncio.TimeoutError:
                yield 0, None
                continue
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Finished):
                n_unfinished -= 1
            yield index, event


async def _require_ongoing(request: Request, seconds: float) -> None:
    """Check that the server should still answer a request that arrived `seconds` ago.

    Raises: ClientDisconnect: the client has left; ApiError: the request has timed out, or the server is shutting down.
    """
    request.app.state.engine.require_alive()
    if await request.is_disconnected():
        raise ClientDisconnect()
    timeout = request.app.state.settings.timeout
    if timeout is not None and seconds > timeout:
        why = f"the request was not answered within {timeout:g} seconds"
        raise ApiError(408, why, code="timeout")


async def _stream(
    first_chunks: list[bytes],
    events: AsyncIterator[tuple[int, Event | None]],
    formatter: ResponseFormatter,
    request_id: str,
) -> AsyncIterator[str | bytes]:
    """Yield server-sent events until all answers are complete, or until one fails or the client leaves.

    Args:
        first_chunks: encoded events from before the stream started.
        events: the engine's remaining events.
        formatter: formats events for the client's API.
        request_id: id of the HTTP request, for error messages.
    """
    yield b"".join(first_chunks)
    last_sent = time.monotonic()
    try:
        async for index, event in events:
            now = time.monotonic()
            is_keep_alive_due = now - last_sent >= KEEP_ALIVE_SECONDS
            if event is None and not is_keep_alive_due:
                continue
            last_sent = now
            for text in formatter.handle(index, event):
                yield text
        for text in formatter.end():
            yield text
    except ClientDisconnect:
        return
    except Exception as error:
        yield formatter.stream_error(as_api_error(error, request_id))
