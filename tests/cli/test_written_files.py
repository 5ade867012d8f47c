"""Commands never overwrite files that this package did not write, and say so when they replace one that it did."""

import shutil

import pytest

from mlx_snapkv import Conversation, SnapKVError
from mlx_snapkv.demo import MODELS

FIDELITY = [
    "eval",
    "fidelity",
    "--policy",
    "tova:budget=8",
    "--length",
    "16",
    "--continuation",
    "1",
]


def cache_prompt(call, file):
    return call("cache-prompt", "--model", "demo", "--prompt", "It was cold.", "-o", str(file))


def test_a_saved_prompt_replaces_only_saved_prompts(refused, demo_llama, tmp_path):
    chat = Conversation(*demo_llama, max_tokens=1)
    list(chat.send("hello"))
    model, link = tmp_path / "model.safetensors", tmp_path / "link.safetensors"
    shutil.copy(MODELS["demo"] / "model.safetensors", model)
    link.symlink_to(model)
    odd = [tmp_path / f"{n}.safetensors" for n in range(2)]
    for file, data in zip(odd, (b"my notes", b"")):
        file.write_bytes(data)
    files = {file: file.read_bytes() for file in (model, link, *odd)}
    for file in files:
        err = cache_prompt(refused, file)
        assert f"{file} exists, and mlx-snapkv did not save it" in err
        with pytest.raises(SnapKVError, match="did not save it"):
            chat.save(file)
    assert {file: file.read_bytes() for file in files} == files and link.is_symlink()


def test_replacing_a_saved_prompt_is_reported_and_a_link_stays_a_link(call, tmp_path):
    file, link = tmp_path / "a.safetensors", tmp_path / "link.safetensors"
    code, _, err = cache_prompt(call, file)
    assert code == 0 and "replacing the earlier" not in err
    link.symlink_to(file)
    before = file.stat().st_ino
    code, _, err = cache_prompt(call, link)
    assert code == 0 and f"saved in {link}, replacing the earlier file" in err
    assert link.is_symlink() and file.stat().st_ino != before


@pytest.mark.parametrize("ending", [".json", ".md", ".jsonl"])
def test_a_result_replaces_only_results(refused, tmp_path, ending):
    file = tmp_path / f"r{ending}"
    file.write_text("my notes")
    fidelity = [*FIDELITY, "--text", str(file)]
    for command in [fidelity, ["bench"]] if ending == ".json" else [fidelity]:
        assert str(file) in refused(*command, "--output", str(tmp_path / "r"))
        assert [p.name for p in tmp_path.iterdir()] == [file.name]
        assert file.read_text() == "my notes"
