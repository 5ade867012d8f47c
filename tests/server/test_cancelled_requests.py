"""After a client leaves, what was read of its prompt serves the next request with the same prefix."""

import weakref

import mlx.core as mx
import pytest

from mlx_snapkv.completions.body import CHAT, Defaults, parse_body
from mlx_snapkv.completions.request import completion_request
from mlx_snapkv.planning.settings import setting_named
from mlx_snapkv.server.checkpoints import Checkpoints
from mlx_snapkv.server.metrics import Metrics
from mlx_snapkv.server.prefix_cache import PrefixCache
from mlx_snapkv.server.requests import EngineRequest, Finished, Loaded, PromptProgress, Started
from mlx_snapkv.server.served_batch import ServedBatch

WINDOW = "n_sink=4,n_window=16,obs_window=32"
SAFE = [None, f"snapkv:budget=64,{WINDOW}", "sparse:budget=64,read_top_k=32"]
CHUNK = 128


class Served:
    """A batch of requests without a server, which collects the events of each request."""

    def __init__(self, loaded, method):
        policy = method and setting_named(method)
        options = {"policy": policy, "prefill_step_size": CHUNK}
        self.loaded = loaded._replace(prefixes=PrefixCache(1 << 30))
        self.checkpoints = Checkpoints(self.loaded, options)
        self.batch = ServedBatch(
            self.loaded, options, 4, self.checkpoints, Metrics(), lambda done, total: None
        )

    def start(self, text, checkpoints=()):
        events = []
        body = parse_body(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 8})
        request = EngineRequest(body, events.append)
        request.completion_request = completion_request(body, self.loaded.tokenizer, Defaults())
        request.checkpoints = list(checkpoints)
        self.batch.start(request)
        return request, events

    def answered(self, text):
        """Return the number of cached tokens, and the answer."""
        _, events = self.start(text)
        while not isinstance(events[-1], Finished):
            self.batch.step()
        (started,) = (event for event in events if isinstance(event, Started))
        return started.n_cached, events[-1].answer.reply.text


@pytest.fixture(scope="module")
def loaded(demo_llama):
    return Loaded(*demo_llama, ("demo",), PrefixCache(0))


@pytest.mark.parametrize("method", SAFE)
def test_a_retry_continues_where_the_first_request_stopped(loaded, document, method):
    text = document[0][:4500]
    whole = Served(loaded, method).answered(text)
    served = Served(loaded, method)
    request, events = served.start(text)
    while not any(isinstance(event, PromptProgress) and event.n_read >= CHUNK for event in events):
        served.batch.step()
    served.batch.remove([request.number])
    n_cached, answer = served.answered(text)
    n_prompt = len(request.completion_request.prompt)
    assert CHUNK <= n_cached < n_prompt - CHUNK and (0, answer) == whole
    mx.clear_cache()


def test_a_prompt_compressed_while_it_is_read_is_not_kept(loaded, document):
    served = Served(loaded, f"keydiff:budget=256,block={CHUNK}")
    request, _ = served.start(document[0][:4500])
    for _ in range(2):
        served.batch.step()
    served.batch.remove([request.number])
    assert served.loaded.prefixes.nbytes == 0


def test_an_evicted_prefix_is_freed_while_its_request_is_answered(loaded, document):
    served = Served(loaded, SAFE[1])
    request, _ = served.start(document[0][:4500])
    while request.report is None:
        served.batch.step()
    (prefix,) = served.loaded.prefixes._prefixes
    cache = weakref.ref(prefix.caches[0])
    del prefix
    served.loaded.prefixes.trim_to(0)
    assert cache() is None and served.batch.running
    served.batch.remove([request.number])


@pytest.mark.parametrize("method", SAFE)
def test_a_checkpoint_is_kept_unless_its_chunk_failed(loaded, document, monkeypatch, method):
    served = Served(loaded, method)
    _, events = served.start(document[0][:4500], [CHUNK, 2 * CHUNK])
    while served.loaded.prefixes.nbytes == 0:
        served.batch.step()

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as failing:
        failing.setattr(type(loaded.model), "__call__", fail)
        while not isinstance(events[-1], Exception):
            served.batch.step()
    assert [len(prefix.ids) for prefix in served.loaded.prefixes._prefixes] == [CHUNK]


def test_prefixes_that_are_short_or_leave_too_few_voting_queries_are_not_kept(loaded, document):
    served = Served(loaded, SAFE[1])
    request, _ = served.start(document[0][:4500])
    prompt = request.completion_request.prompt
    for n in (CHUNK - 1, len(prompt) - 31):
        served.checkpoints.insert_cancelled(request, prompt[:n], [])
        assert served.loaded.prefixes.fetch(prompt, 1) == ([], 0)
    served.batch.remove([request.number])
