"""No command replaces a file that is not this package's own, and replacing one of its own is said."""

import json
import shutil

import pytest
from disk_helpers import full_disk

from mlx_snapkv import Conversation, SnapKVError
from mlx_snapkv.demo import MODELS

NEEDLE = ["eval", "needle", "--length", "256", "--depths", "1"]


@pytest.fixture
def cache_prompt(call):
    return lambda file: call(
        "cache-prompt", "--model", "demo", "--prompt", "It was cold.", "-o", str(file)
    )


def foreign(folder):
    """Files that the package did not save, and what they hold."""
    model = folder / "model.safetensors"
    shutil.copy(MODELS["demo"] / "model.safetensors", model)
    files = {model: model.read_bytes()}
    for name, data in (("text", b"my notes"), ("empty", b""), ("odd", b"\xff" * 100)):
        files[folder / f"{name}.safetensors"] = data
        (folder / f"{name}.safetensors").write_bytes(data)
    link = folder / "link.safetensors"
    link.symlink_to(model)
    return files | {link: files[model]}


def test_a_saved_prompt_replaces_only_saved_prompts(cache_prompt, demo_llama, tmp_path):
    chat = Conversation(*demo_llama, max_tokens=1)
    list(chat.send("hello"))
    files = foreign(tmp_path)
    for file in files:
        code, out, err = cache_prompt(file)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{file} is there already, and mlx-snapkv did not save it" in err
        with pytest.raises(SnapKVError, match="did not save it"):
            chat.save(file)
    assert {file: file.read_bytes() for file in files} == files
    assert (tmp_path / "link.safetensors").is_symlink()


def test_replacing_a_saved_prompt_is_said_and_a_link_stays_one(cache_prompt, tmp_path):
    file, link = tmp_path / "a.safetensors", tmp_path / "link.safetensors"
    code, _, err = cache_prompt(file)
    assert code == 0 and "in place of" not in err
    link.symlink_to(file)
    before = file.stat().st_ino
    for name in (file, link):
        code, _, err = cache_prompt(name)
        assert code == 0 and f"saved in {name}, in place of the one that was there" in err
        assert link.is_symlink() and file.stat().st_ino != before
        before = file.stat().st_ino


@pytest.mark.parametrize("ending", [".json", ".md", "-full-cache-known.png", ".jsonl"])
def test_a_result_replaces_only_results(call, tmp_path, ending):
    file = tmp_path / f"r{ending}"
    file.write_text("my notes")
    code, out, err = call(*NEEDLE, "--output", str(tmp_path / "r"))
    assert (code, out, err.count("\n")) == (2, "", 1) and str(file) in err
    assert [p.name for p in tmp_path.iterdir()] == [file.name] and file.read_text() == "my notes"
    if ending in (".json", ".md"):
        code, out, err = call("bench", "--output", str(tmp_path / "r"))
        assert (code, out, err.count("\n")) == (2, "", 1) and file.read_text() == "my notes"


def test_replacing_a_result_is_said(call, tmp_path):
    args = [*NEEDLE, "--output", str(tmp_path / "r")]
    code, out, _ = call(*args)
    assert code == 0 and f"wrote {tmp_path}/r.json " in out and "replaced" not in out
    code, out, _ = call(*args)
    assert code == 0 and f"replaced {tmp_path}/r.json " in out and "wrote" not in out
    assert json.loads((tmp_path / "r.json").read_text())["summary"]


INSPECT = "inspect --model demo -q --policy keydiff:budget=25% --prompt Cold. -m 2 -o".split()


def test_a_full_disk_leaves_the_page_of_before(call, tmp_path):
    page = tmp_path / "r.html"
    page.write_text('<meta name="generator" content="mlx-snapkv">')
    with full_disk(5000):
        code, _, err = call(*INSPECT, str(page))
    assert code == 1 and err == f"mlx-snapkv: {page} can't be written: File too large\n"
    assert page.read_text() == '<meta name="generator" content="mlx-snapkv">'
    assert list(tmp_path.iterdir()) == [page]
