"""What was read outlives the server, and nothing damaged or foreign is used."""

import os
import random
import shutil
import stat

import httpx
import pytest
from server_helpers import POLICY, served_process

from mlx_snapkv.demo.questions import make_haystack

FLAGS = ("--policy", POLICY, "--memory", "recall")
BOOK = "keydiff:budget=256,block=128,min_ctx=256 then snapkv:budget=128,n_sink=4,n_window=32"


@pytest.fixture(scope="module")
def document(demo_llama):
    return make_haystack(demo_llama[1], random.Random(8), 4, 1500)


def answered(url, messages, max_tokens=20):
    """An answer, and how many tokens of its prompt were known."""
    body = {"messages": messages, "max_tokens": max_tokens}
    found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["message"]["content"], cached


def asked(document, number):
    text, facts = document
    return [{"role": "user", "content": f"{text}\n\n{facts[number].question}"}]


def follow_up(document, number):
    """The first question with its answer, and then another."""
    _, facts = document
    said = {"role": "assistant", "content": facts[0].value}
    return [*asked(document, 0), said, {"role": "user", "content": facts[number].question}]


def ask(url, document, number):
    answer, cached = answered(url, asked(document, number))
    assert answer == document[1][number].value
    return cached


@pytest.mark.parametrize("flags", [("--policy", POLICY, "--memory", "recall:file:8bit"), ()])
def test_a_killed_servers_prefixes_are_used_by_the_next_one(document, tmp_path, flags):
    folder = tmp_path / "prefixes"
    with served_process(*flags, "--prefix-dir", str(folder)) as (url, process):
        assert ask(url, document, 0) == 0
        process.kill()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]
    with served_process(*flags, "--prefix-dir", str(folder)) as (url, process):
        assert ask(url, document, 1) > 1400
        assert ask(url, document, 2) > 1400


def test_a_conversation_of_a_killed_server_goes_on_from_compressed_entries(document, tmp_path):
    """Without a memory: exactly from where it was, and nothing else does."""
    flags = ("--policy", POLICY, "--prefix-dir", str(tmp_path))
    said = follow_up(document, 1)
    with served_process(*flags) as (url, process):
        assert ask(url, document, 0) == 0
        process.kill()
    with served_process(*flags) as (url, process):
        assert answered(url, said, 5)[1] > 1400
        assert ask(url, document, 2) == 0


def test_a_model_that_takes_nothing_back_goes_on_from_its_files(document, tmp_path):
    flags = ("--model", "demo-qwen3-next", *FLAGS, "--prefix-dir", str(tmp_path))
    with served_process(*flags, "--prefix-bytes", "1") as (url, process):
        assert ask(url, document, 0) == 0
        assert ask(url, document, 0) > 1400
        process.terminate()
        assert "was not kept" not in process.stderr.read()


def test_a_book_of_a_killed_server_goes_on(document, tmp_path):
    """Read within a budget, all of it on the disk: what was said before is known, and a later question finds all."""
    flags = ("--policy", BOOK, "--memory", "recall:file", "--prefix-dir", str(tmp_path))
    said = follow_up(document, 3)
    with served_process(*flags) as (url, process):
        assert ask(url, document, 0) == 0
        process.kill()
    (folder,) = tmp_path.glob("*.entries")
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    with served_process(*flags) as (url, process):
        answer, cached = answered(url, said)
        assert answer == document[1][3].value and cached > 1400
    with served_process(*flags, "--prefix-dir-bytes", "3MB") as (url, process):
        ask(url, document, 1)
        (folder,) = tmp_path.glob("*.entries")  # the others have given way
        assert len(list(tmp_path.iterdir())) == 2


def test_damaged_foreign_and_other_settings_are_not_used(document, tmp_path):
    with served_process(*FLAGS, "--prefix-dir", str(tmp_path)) as (url, _):
        ask(url, document, 0)
    (good,) = tmp_path.iterdir()
    data = good.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[: len(data) // 2])
    (tmp_path / "none.safetensors").write_bytes(b"nothing")
    (tmp_path / "other.txt").write_text("a file of somebody's")
    flipped = bytearray(data)
    flipped[-100] ^= 1
    good.write_bytes(flipped)
    with served_process(*FLAGS, "--prefix-dir", str(tmp_path)) as (url, process):
        assert ask(url, document, 1) == 0
        process.terminate()
        log = process.stderr.read()
    assert log.count("a prefix is not used") >= 3 and "Traceback" not in log
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    good.write_bytes(data)
    other = ("--policy", POLICY.replace("25%", "30%"), "--memory", "recall")
    with served_process(*other, "--prefix-dir", str(tmp_path)) as (url, _):
        assert ask(url, document, 1) == 0


def test_a_damaged_book_is_not_used_and_the_request_is_answered(document, tmp_path):
    """What is wrong with its entries is found out when they are first read, by a request that goes on from it."""
    flags = ("--policy", BOOK, "--memory", "recall:file", "--prefix-dir", str(tmp_path))
    said = follow_up(document, 3)
    with served_process(*flags) as (url, process):
        assert ask(url, document, 0) == 0
    for path in tmp_path.glob("*.entries/*.values"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    with served_process(*flags) as (url, process):
        for _ in range(2):
            assert answered(url, said) == (document[1][3].value, 0)
        process.terminate()
        log = process.stderr.read()
    assert log.count(".values is damaged") == 1 and "Traceback" not in log


def test_files_that_change_places_under_a_server_are_not_used(document, demo_llama, tmp_path):
    other = make_haystack(demo_llama[1], random.Random(9), 4, 1500)
    with served_process(*FLAGS, "--prefix-dir", str(tmp_path)) as (url, _):
        assert ask(url, document, 0) == 0
        assert ask(url, other, 0) < 10
    with served_process(*FLAGS, "--prefix-dir", str(tmp_path)) as (url, process):
        one, two = tmp_path.iterdir()
        one.rename(tmp_path / "aside")
        two.rename(one)
        (tmp_path / "aside").rename(two)
        assert ask(url, document, 1) == 0
        assert ask(url, other, 1) < 10
        process.terminate()
        assert process.stderr.read().count("has become another prompt's") == 2


def test_what_a_killed_server_had_not_finished_goes_but_not_what_another_one_writes(tmp_path):
    """Or it would stay for good, beside what --prefix-dir-bytes counts, and be told at every start."""
    name = "0" * 32
    left = [
        tmp_path / f".{name}.4711.safetensors",
        tmp_path / f"{name}-0123456789ab.entries/0.keys",
    ]
    others = [tmp_path / f".{name}.4712.safetensors", tmp_path / "mine-0123456789ab.entries/0.keys"]
    others.append(tmp_path / "notes.entries/0.keys")
    for path in (*left, *others):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"the beginning")
    for path in (left[0], left[1], left[1].parent, others[2], others[2].parent):
        os.utime(path, (1e9, 1e9))
    with served_process(*FLAGS, "--prefix-dir", str(tmp_path)) as (_, process):
        process.terminate()
        assert "a prefix" not in process.stderr.read()
    assert not any(path.exists() for path in (*left, left[1].parent))
    assert all(path.exists() for path in others)


def test_entries_quantised_in_other_groups_are_not_used(document, tmp_path):
    flags = ("--policy", POLICY, "--kv-bits", "8", "--prefix-dir", str(tmp_path))
    said = follow_up(document, 0)
    with served_process(*flags, "--kv-group-size", "32") as (url, _):
        assert ask(url, document, 0) == 0
    for size in ("64", "32"):
        with served_process(*flags, "--kv-group-size", size) as (url, _):
            _, cached = answered(url, said, 2)
            assert (cached > 1400) == (size == "32")
            said[-1]["content"] += " Once more."


def test_the_oldest_give_way_of_other_settings_too(document, tmp_path):
    """Or a folder would grow with every policy that was tried."""
    flags = ("--prefix-dir", str(tmp_path), "--prefix-dir-bytes", "8MB")
    somebodys = tmp_path / "notes.safetensors"
    somebodys.write_bytes(b"x" * 4_000_000)
    with served_process(*FLAGS, *flags) as (url, _):
        ask(url, document, 0)
    (first,) = set(tmp_path.iterdir()) - {somebodys}
    other = ("--policy", POLICY.replace("25%", "30%"), "--memory", "recall")
    with served_process(*other, *flags) as (url, process):
        assert ask(url, document, 0) == 0
        process.terminate()
        assert "is not removed" not in process.stderr.read()
    assert not first.exists() and len(os.listdir(tmp_path)) == 2 and somebodys.exists()
