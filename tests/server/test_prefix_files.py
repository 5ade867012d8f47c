"""Prefixes in files outlive the server. Damaged and foreign files are not used."""

import os
import shutil
from signal import SIGTERM

import httpx
import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from server_helpers import POLICY, ask, served_process, talk
from tiny_models import make_llama

from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.server.prefix import as_ids, longest_prefix
from mlx_snapkv.server.prefix_files import PrefixFiles

ONE, OTHER = list(range(40)), list(range(20, 60))


def known(url, document, *numbers, **fields):
    """Ask a question after others and their answers. Assert the answer, and return the number of cached tokens."""
    text, facts = document
    said = [text + "\n\n"]
    for number in numbers:
        said[-1] += facts[number].question
        said += [facts[number].value, ""]
    with httpx.Client(base_url=url, timeout=60) as client:
        answer, cached, _ = ask(client, talk(*said[:-2]), **fields)
    assert answer == said[-2] or fields
    return cached


def is_private(folder):
    """Return whether only the owner can access the folder and the files in it."""
    return not any(path.stat().st_mode & 0o077 for path in (folder, *folder.rglob("*")))


@pytest.mark.parametrize(
    "flags",
    [
        ("--policy", POLICY, "--prefix-bytes", "1GB"),
        ("--policy", POLICY, "--model", "demo-qwen3-next"),  # caches that can't be cut
    ],
)
def test_a_killed_servers_prefixes_are_used_by_the_next_one(document, tmp_path, flags):
    folder = tmp_path / "prefixes"
    flags = (*flags, "--prefix-dir", str(folder))
    with served_process(*flags) as (url, process):
        assert known(url, document, 0) == 0
        process.kill()
    assert is_private(folder) and any(folder.iterdir())
    with served_process(*flags) as (url, _):
        again = 0 if "demo-qwen3-next" in flags else 1
        assert known(url, document, again) > 1400


def test_a_killed_servers_conversation_continues_from_compressed_entries(document, tmp_path):
    """Only the conversation itself can continue from them, but not another question about the document."""
    policy, bits = "keydiff:budget=256,block=64", ("--kv-bits", "8", "--kv-group-size", "32")
    flags = ("--policy", policy, *bits, "--prefix-dir", str(tmp_path))
    with served_process(*flags) as (url, process):
        assert known(url, document, 0) == 0
        process.kill()
    with served_process(*flags) as (url, _):
        assert known(url, document, 0, 1, max_tokens=2) > 1400
        assert known(url, document, 2, max_tokens=2) == 0


def test_all_options_that_change_entries_are_part_of_a_prefix_identity():
    policy, sparse = {"policy": "keydiff:budget=256"}, {"sparse": "budget=256"}
    settings = [
        {},
        policy,
        {"policy": "keydiff:budget=128"},
        *(policy | {"kv_bits": bits} for bits in (4, 8)),
        policy | {"kv_bits": 8, "kv_group_size": 32},
        sparse,
        {"sparse": "budget=256,read_top_k=16"},
        {"sparse": "budget=256,store=8bit"},
    ]
    identities = [CompressionConfig.from_keywords(each)[0].identity for each in settings]
    assert all(identities.count(each) == 1 for each in identities)


def test_a_killed_servers_entries_in_files_are_used_unless_they_are_damaged(document, tmp_path):
    """Damage is found when a request first reads the entries. The request is still answered."""
    flags = ("--sparse", "budget=256", "--store", "file", "--prefix-dir", str(tmp_path))
    none_in_memory = ("--prefix-bytes", "1")
    with served_process(*flags, *none_in_memory) as (url, process):
        assert known(url, document, 0) == 0
        process.kill()
    (folder,) = tmp_path.glob("*.entries")
    assert is_private(folder)
    shutil.copytree(tmp_path, copy := tmp_path.with_name("copy"))
    with served_process(*flags, *none_in_memory) as (url, _):
        assert known(url, document, 1) > 1400
        assert known(url, document, 0, 3) > 1400
    for path in copy.glob("*.entries/*.values"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    with served_process(*flags, "--prefix-dir", str(copy)) as (url, process):
        assert known(url, document, 0, 3) == 0
        assert known(url, document, 0, 3) > 1400  # the first request has read it again
        process.send_signal(SIGTERM)
        log = process.stderr.read()
    assert log.count(".values is damaged") == 1 and "Traceback" not in log


@pytest.fixture(scope="module")
def model():
    return make_llama()


def written(files, model, *prompts):
    for tokens in prompts:
        caches = make_prompt_cache(model)
        model(mx.array([tokens]), cache=caches)
        files.write(tokens, caches)


def n_known(files, tokens):
    """Return how many of these tokens the caches in a file have read."""
    n, file = longest_prefix(files.prefixes, as_ids(tokens))
    return n if file and files.read(file) else 0


def test_only_whole_files_of_the_same_setting_are_used(model, tmp_path, caplog):
    written(PrefixFiles(tmp_path, 1 << 30, model, {"setting": "one"}), model, ONE)
    (good,) = tmp_path.iterdir()
    data = good.read_bytes()
    (tmp_path / f"{'0' * 32}.safetensors").write_bytes(data[: len(data) // 2])
    (tmp_path / "other.safetensors").write_text("another program's file")
    files = PrefixFiles(tmp_path, 1 << 30, model, {"setting": "one"})
    assert n_known(files, [*ONE[:30], 1, 1]) == 30 and len(caplog.records) == 1
    for others, setting in ((model, "other"), (make_llama(seed=1), "one")):
        assert PrefixFiles(tmp_path, 1 << 30, others, {"setting": setting}).prefixes == []
    good.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    assert n_known(files, ONE) == 0 and "checksum does not match" in caplog.records[-1].getMessage()
    good.write_bytes(data)
    files = PrefixFiles(tmp_path, 1 << 30, model, {"setting": "one"})
    written(PrefixFiles(tmp_path / "other", 1 << 30, model, {"setting": "one"}), model, OTHER)
    os.replace(next((tmp_path / "other").iterdir()), good)  # while the server runs
    assert n_known(files, ONE) == 0 and "another prompt" in caplog.records[-1].getMessage()


def test_unfinished_files_of_a_killed_server_are_deleted_and_newer_ones_stay(model, tmp_path):
    """They would stay forever, uncounted by --prefix-dir-bytes. Newer files may belong to another server."""
    name = "0" * 32
    left = [".0123456789ab.part", f"{name}-0123456789ab.entries/0.keys"]
    others = ["notes.entries/0", ".ba9876543210.part", "mine-0123456789ab.entries/0.keys"]
    left, others = ([tmp_path / each for each in names] for names in (left, others))
    for path in (*left, *others):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"the beginning")
    for path in (*left, left[1].parent, others[0], others[0].parent):
        os.utime(path, (1e9, 1e9))
    PrefixFiles(tmp_path, 1 << 30, model, {})
    assert not left[0].exists() and not left[1].parent.exists()
    assert all(path.exists() for path in others)


def test_the_oldest_files_make_room_even_those_of_other_settings(model, tmp_path):
    foreign = tmp_path / "notes.safetensors"
    foreign.write_bytes(b"x" * 100_000)
    written(PrefixFiles(tmp_path, 1, model, {"setting": "one"}), model, ONE)
    (first,) = set(tmp_path.iterdir()) - {foreign}
    size = first.stat().st_size
    files = PrefixFiles(tmp_path, 7 * size // 2, model, {"setting": "other"})
    written(files, model, OTHER)
    assert first.exists()
    written(files, model, ONE[::-1], OTHER[::-1])
    assert not first.exists() and len(os.listdir(tmp_path)) == 4 and foreign.exists()
