"""Entries in files: each is mapped once, and a process that reaches its limit of open files gets more, or is told."""

import copy
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_snapkv import Conversation
from mlx_snapkv.caches.file_map import file_map
from mlx_snapkv.caches.stores import file as file_store
from mlx_snapkv.caches.stores.file import FileStore
from mlx_snapkv.entries.entries import Entries

HEADS = (1, 2)


def entries(n):
    return Entries(*(mx.random.normal((*HEADS, n, 64)) for _ in range(2)))


def test_a_file_is_mapped_once_and_again_only_where_it_has_grown(monkeypatch):
    made = []
    monkeypatch.setattr(file_store, "file_map", lambda number: made.append(1) or file_map(number))
    store = FileStore()
    for n_maps in (2, 4):
        store.append(entries(50))
        for _ in range(3):
            store.gather(mx.full((*HEADS, 5), store.n_entries - 1, mx.uint32))
            store.entries()
        assert len(made) == n_maps  # of keys and of values
    store.truncate(60)  # and grow again below what is mapped
    store.append(entries(40))
    more = store.entries(90, 100)
    assert len(made) == 4 and mx.array_equal(store.entries()[1][:, :, 90:], more[1])


OPENING = """
import os, resource, sys
import mlx.core as mx
from mlx_snapkv import SnapKVError
from mlx_snapkv.caches.file_map import file_map
from mlx_snapkv.caches.stores.file import FileStore
from mlx_snapkv.entries.entries import Entries

soft, hard, n = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
if soft < hard:  # as if others had opened all
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(soft - len(os.listdir("/dev/fd")) + 1)]
stores = []
try:
    for _ in range(n):
        stores.append(FileStore())
        stores[-1].append(Entries(mx.zeros((1, 1, 3, 32)), mx.zeros((1, 1, 3, 32))))
        stores[-1].entries()
except SnapKVError as error:
    print(error)
else:
    print(sum(store.n_entries for store in stores))
"""


def opening(soft, hard, n):
    """What a process with these limits says when `n` layers' entries go to files."""
    command = [sys.executable, "-c", OPENING, str(soft), str(hard), str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_process_of_256_open_files_gets_more():
    """As a Mac's shells start it."""
    assert opening(256, 4096, 200) == "600"


def test_where_the_system_allows_no_more_one_sentence_says_so():
    said = opening(64, 64, 200)
    assert said.count("\n") == 0 and "all 64 files that this process may open are open" in said
    assert "ulimit -n" in said and "or use another store" in said


def maps_of(folder):
    """This process's maps of files in a folder, with or without names."""
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's list of maps")
def test_a_map_goes_with_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = FileStore()
    store.append(entries(50))
    held = store.entries()
    assert len(maps_of(tmp_path)) == 2
    del store
    gc.collect()
    assert maps_of(tmp_path) == [] and mx.all(mx.isfinite(held[0]))


@pytest.mark.skipif(sys.platform != "linux", reason="counts Linux's descriptors")
def test_a_conversation_of_a_hundred_books_has_few_files_open():
    """The server copies its caches for every turn, and what a copy is given goes to files of its own."""
    gc.collect()
    before, store, all_keys = len(os.listdir("/proc/self/fd")), FileStore(), []
    for n in range(100):
        store, book = copy.deepcopy(store), entries(10 + n % 7)
        store.append(book)
        all_keys.append(book.stored_keys)
        assert store.n_entries and len(os.listdir("/proc/self/fd")) - before <= 2 * 8
    assert mx.array_equal(store.entries()[0], mx.concatenate(all_keys, axis=2))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) - before == 2 * len(
        store._parts
    )  # their maps have none


def test_large_parts_are_not_copied(monkeypatch):
    monkeypatch.setattr(file_store, "JOINED", 60 * 2 * 64 * 4)
    store = FileStore()
    for n in (50, 50, 20, 20, 20):
        store = copy.deepcopy(store)
        store.append(entries(n))
    assert [part.n_entries for part in store._parts] == [50, 50, 60]


def test_a_conversation_reads_all_documents_into_the_same_files(demo_llama):
    model, tokenizer = demo_llama
    options = {"store": "file", "sparse": "budget=40", "max_tokens": 1}
    conversation, counts = Conversation(model, tokenizer, **options), []
    gc.collect()  # what earlier tests have left
    for n in range(8):
        conversation.attach(f"The access code of the amber falcon is {n}.")
        list(conversation.send("And what is it?"))
        counts.append(len(os.listdir("/dev/fd")))
    assert counts[-1] == counts[1]
