"""What a CPU's threads share out is what one of them computes."""

import threading
from functools import partial

import mlx.core as mx
import pytest
from entry_helpers import computing, normal

from mlx_snapkv.caches.gathered import Gathered
from mlx_snapkv.entries.clusters import clusters_of
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.key_index import KeyIndex
from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.entries.selection import take_entries, top_of_groups
from mlx_snapkv.entries.threads import GATHERED, SCANNED, at_once, by_heads

H, GROUPS, D = 3, 2, 32
N = SCANNED // H + 5


def read_by_a_token(keys, values, queries) -> list[mx.array]:
    """Two tokens': places, how many of each cluster, and what they gather in one buffer."""
    index = KeyIndex(keys[:, :, :256])
    index.append(keys)
    gathered, found = Gathered(), []
    clusters = clusters_of(Entries(keys, values))
    gathered.append(keys[:, :, :4], values[:, :, :4])
    for heads in (queries, -queries):
        relevance = index.relevance(Queries(heads, range(N, N + 1), 1.0), N)
        top = top_of_groups(relevance, GATHERED // 2)
        read = gathered.read(tuple(take_entries((keys, values), top)), None)
        found += [top, clusters.sizes(top), *map(mx.array, read)]
    mx.eval(found)
    return found


def test_a_token_reads_the_same_by_any_number_of_threads(monkeypatch):
    keys, values = normal(1, H, N, D), normal(1, H, N, D, seed=1)
    queries = normal(1, H * GROUPS, 1, D, seed=2)
    found = []
    for threads in (1, 2, 4):
        computing(monkeypatch, threads=threads)
        found.append(read_by_a_token(keys, values, queries))
    for others in found[1:]:
        assert all(mx.array_equal(x, y) for x, y in zip(found[0], others, strict=True))


@pytest.mark.parametrize("batch, n, parts", [(1, SCANNED, 2), (2, SCANNED, 1), (1, 100, 1)])
def test_heads_are_shared_out_where_it_pays(monkeypatch, batch, n, parts):
    computing(monkeypatch, threads=2)
    given, calls = normal(batch, H, 4), []

    def double(x):
        calls.append(x.shape[1])
        return 2 * x

    assert mx.array_equal(by_heads(double, n, given), 2 * given)
    assert len(calls) == parts and sum(calls) == H


def test_a_thread_of_a_server_may_share_out_what_another_did(monkeypatch):
    """Streams of MLX belong to the thread that made them."""
    computing(monkeypatch, threads=3)
    given, found = [normal(4), normal(4, seed=1), normal(4, seed=2)], []

    def work():
        found.append(at_once(GATHERED, [partial(mx.add, x, 1) for x in given]))
        mx.eval(found[-1])

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    work()
    assert len(found) == 3
    assert all(mx.array_equal(x, y + 1) for each in found for x, y in zip(each, given))
