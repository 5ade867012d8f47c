"""Saved prompts with entries in files, in a folder next to the saved file. A failed save loses nothing."""

import shutil
from dataclasses import replace

import pytest
from disk_helpers import full_disk
from entry_helpers import exact_up_to
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from request_helpers import assert_same, plain, steps
from saved_helpers import question, saved_file
from tiny_models import make_llama, make_qwen

from mlx_snapkv import SnapKVError, prefill, saved
from mlx_snapkv.saved import book
from mlx_snapkv.sparse import growing_rows
from mlx_snapkv.sparse.full_view import FullView
from mlx_snapkv.sparse.options import Sparse
from mlx_snapkv.sparse.stored_cache import StoredKVCache

SPARSE = Sparse(top_k=20, n_sink=4, n_window=16, when="always", store="file")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(book, "CHECKSUM_BYTES", 1000)


def save(path, model, tokens, store="file"):
    caches, _ = prefill(model, tokens, sparse=replace(SPARSE, store=store))
    saved.save(path, model, caches, tokens, SPARSE)
    return caches


def beside(path, pattern="*.entries"):
    """Return a book's folder, or the files in it, as a list."""
    return sorted(path.parent.glob(pattern))


def asked(model, cache, store="file"):
    """Return the tokens that follow a question, and their log-probabilities."""
    return steps(model, question(), n=6, prompt_cache=cache, sparse=replace(SPARSE, store=store))


@pytest.mark.parametrize("make", [make_llama, make_qwen])
def test_a_loaded_book_answers_as_the_saved_caches(path, tokens, make):
    model = make(head_dim=32)
    caches = save(path, model, tokens)
    wanted = asked(model, caches)
    for store in ("memory", "file"):
        loaded = saved.load(path, model)
        assert (loaded.tokens, loaded.policy) == (tokens.tolist(), str(SPARSE))
        assert_same(asked(model, loaded.prompt_cache, store), wanted)
    # Entries saved from memory can be moved into files.
    save(path, model, tokens, "memory")
    assert not beside(path)
    assert_same(asked(model, saved.load(path, model).prompt_cache), wanted)


@pytest.mark.parametrize("resident", [1 << 16, 64])
def test_an_index_is_saved_with_a_book(path, tmp_path, tokens, monkeypatch, resident):
    """The index has its own files. Loading moves all but the first codes to temporary files in `store_dir`."""
    exact_up_to(monkeypatch, 50)
    monkeypatch.setattr(growing_rows, "ENTRIES_IN_MEMORY", resident)
    monkeypatch.setattr(growing_rows, "ENTRIES_MOVED", 32)
    model = make_llama(head_dim=32)
    caches = make_prompt_cache(model)
    steps(model, tokens, 1, prompt_cache=caches, sparse=SPARSE)
    said = [*tokens.tolist(), 0][: caches[0].offset]
    saved.save(path, model, caches, said, SPARSE)
    folder = tmp_path / "empty"
    folder.mkdir()
    loaded = saved.load(path, model, store_dir=str(folder)).prompt_cache
    monkeypatch.delattr(FullView, "make_index")
    assert [len(c.index) for c in loaded] == [len(said)] * len(loaded)
    assert [c.index.codes.reads_allocate for c in loaded] == [resident < len(said)] * len(loaded)
    assert_same(asked(model, loaded), asked(model, caches))
    folder.rmdir()
    if resident < len(said):
        with pytest.raises(SnapKVError, match=f"in a file in {folder}"):
            saved.load(path, model, store_dir=str(folder))
    *_, file = beside(path, "*.entries/*.codes")
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(SnapKVError, match=r"can't be used: .*001\.codes is damaged: a checksum"):
        saved.load(path, model)


def test_a_replaced_book_leaves_no_files(path, tokens):
    model = make_llama()
    save(path, model, tokens)
    (first,) = beside(path)
    opened = saved.load(path, model).prompt_cache
    save(path, model, tokens)
    assert beside(path) != [first]
    assert_same(asked(model, opened), asked(model, saved.load(path, model).prompt_cache))
    saved_file(path, model, tokens)  # a file without a book
    assert list(path.parent.iterdir()) == [path]


def test_a_book_may_be_moved_with_its_folder_and_opening_reads_no_entries(path, tokens, tmp_path):
    model = make_llama()
    wanted = asked(model, save(path, model, tokens))
    other = tmp_path / "elsewhere"
    other.mkdir()
    for each in (path, *beside(path)):
        shutil.move(each, other)
    moved = (other / path.name).rename(other / "renamed.safetensors")
    assert_same(asked(model, saved.load(moved, model).prompt_cache), wanted)
    for file in beside(moved, "*.entries/*"):
        file.write_bytes(bytes(file.stat().st_size))
    cache = saved.load(moved, model).prompt_cache
    with pytest.raises(SnapKVError, match=r"000\.keys is damaged: a checksum does not match"):
        asked(model, cache)
    shutil.rmtree(*beside(moved))
    gone = r"can't be used: .*\.entries, is missing: keep it beside the file"
    with pytest.raises(SnapKVError, match=gone):
        saved.load(moved, model)


def contents(path):
    return {file: file.read_bytes() for file in (path, *beside(path, "*.entries/*"))}


@pytest.mark.parametrize("at", ["entries", "file", "replaced", "full disk"])
def test_an_interrupted_save_leaves_one_whole_book(path, tokens, at, monkeypatch):
    model = make_llama()
    caches = save(path, model, tokens)
    before, replace = contents(path), book.os.replace

    def interrupt(*args):
        if at == "replaced" and len(args) == 2:
            replace(*args)
        raise KeyboardInterrupt

    room = (
        int(0.9 * beside(path, "*.entries/*")[0].stat().st_size) if at == "full disk" else 1 << 30
    )
    with (
        monkeypatch.context() as interrupted,
        full_disk(room),
        pytest.raises((KeyboardInterrupt, SnapKVError), match=r"File too large|^$"),
    ):
        if at == "file":
            interrupted.setattr(saved.files, "save_prompt_cache", interrupt)
        elif at == "replaced":
            interrupted.setattr(book.os, "replace", interrupt)
        progress = interrupt if at == "entries" else None
        saved.save(path, model, caches, tokens, SPARSE, progress=progress)
    assert len(list(path.parent.iterdir())) == 2
    assert (contents(path) == before) == (at != "replaced")
    asked(model, saved.load(path, model).prompt_cache)


def test_caches_of_a_book_loaded_by_mlx_lm_say_what_is_missing(path, tokens):
    model = make_llama()
    caches = save(path, model, tokens)
    cache = load_prompt_cache(str(path))
    assert isinstance(cache[0], StoredKVCache)
    with pytest.raises(SnapKVError, match="without the entries beside it: load it with"):
        plain(model, question(), prompt_cache=cache)
    save_prompt_cache(str(path.with_name("theirs.safetensors")), caches)
    with pytest.raises(SnapKVError, match="it does not say where its entries are"):
        saved.load(path.with_name("theirs.safetensors"), model)
