"""No command replaces a file that is not this package's own, and replacing one of its own is said."""

import json
import os
import shutil
import sys

import fork_helpers
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


def test_places_that_are_no_files(cache_prompt, tmp_path):
    folder, pipe = tmp_path / "x.safetensors", tmp_path / "pipe.safetensors"
    folder.mkdir()
    os.mkfifo(pipe)
    for place, words in [
        (folder, "is a folder"),
        (pipe, "is no regular file"),
        (tmp_path / "no" / "x.safetensors", "there is no folder"),
        (tmp_path / ("x" * 300 + ".safetensors"), "File name too long"),
        ("/dev/null/x.safetensors", "Not a directory"),
    ]:
        code, out, err = cache_prompt(place)
        assert (code, out, err.count("\n")) == (2, "", 1) and words in err


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


def test_a_disk_that_is_full_is_told_with_the_reason(tmp_path):
    file = tmp_path / "a.safetensors"
    program = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)); "
    program += "from mlx_snapkv.__main__ import main; main()"
    options = ["cache-prompt", "--model", "demo", "-q", "--prompt", "It was cold.", "-o", str(file)]
    command = [sys.executable, "-c", program, *options]
    done = fork_helpers.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"mlx-snapkv: {file} can't be written: File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_for_results_is_made_before_the_model_is_loaded_or_refused(call, tmp_path):
    file = tmp_path / "file"
    file.write_text("my notes")
    for command in (NEEDLE, ["bench"]):
        for place in (file / "r", file / "deep" / "r"):
            code, out, err = call(*command, "--output", str(place))
            assert (code, out, err.count("\n")) == (2, "", 1) and f"--output {place}: " in err
    assert list(tmp_path.iterdir()) == [file] and file.read_text() == "my notes"
    code, _, _ = call(*NEEDLE, "--output", str(tmp_path / "new" / "deep" / "r"))
    assert code == 0 and (tmp_path / "new" / "deep" / "r.json").is_file()
    for name in ("", f"{tmp_path}/"):
        code, out, err = call(*NEEDLE, "--output", name)
        assert (code, out, err.count("\n")) == (2, "", 1) and "names a folder" in err


@pytest.mark.parametrize(
    "told, command",
    [
        ("--store-dir {}", "generate --model demo --prompt x --memory recall:file --store-dir {}"),
        ("--output {}", "eval needle --model demo --output {}"),
        ("{}", "batch --model demo --output answers.jsonl {}"),
        ("--save-document {}", "demo --save-document {}"),
        ("{}", "cache-prompt --model demo --prompt x -o {}"),
        ("--prefix-dir {}", "serve --model demo --memory recall --policy keydiff --prefix-dir {}"),
        ("--data {}", "eval data --model demo --data {}"),
    ],
)
def test_a_home_folder_that_is_not_there_is_told_by_every_command(call, told, command):
    name = "~no-such-user/x.safetensors"
    code, out, err = call(*command.format(name).split())
    assert (code, out) == (2, "")
    assert err == f"mlx-snapkv: {told.format(name)}: no such home folder\n"


INSPECT = ["inspect", "--model", "demo", "-q", "--policy", "keydiff:budget=25%"]
INSPECT += ["--prompt", "It was cold.", "-m", "2", "--output"]


@pytest.mark.parametrize(
    ("args", "name", "written", "most"),
    [
        (INSPECT, "r.html", "r.html", 5000),
        (INSPECT, "r.png", "r.png", 5000),
        ([*NEEDLE, "--output"], "r", "r-full-cache-known.png", 5000),
        ([*NEEDLE, "--output"], "r", "r.jsonl", 100),
        (["demo", "--tokens", "1024", "--questions", "1", "--save-document"], "r", "r", 500),
    ],
)
def test_a_full_disk_leaves_results_as_they_were(tmp_path, args, name, written, most):
    program = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most})); "
    program += "from mlx_snapkv.__main__ import main; main()"
    command = [sys.executable, "-c", program, *args, str(tmp_path / name)]
    for _ in range(2):  # nothing is in the way of the next
        done = fork_helpers.run(command, capture_output=True, text=True)
        told = done.stderr.splitlines()[-1]
        assert done.returncode in (1, 2) and str(tmp_path / written) in told
        assert told.endswith("File too large") and "Traceback" not in done.stderr
        assert [path for path in tmp_path.iterdir() if path.suffix != ".jsonl"] == []


def test_a_full_disk_leaves_the_page_of_before(call, tmp_path):
    page = tmp_path / "r.html"
    page.write_text('<meta name="generator" content="mlx-snapkv">')
    with full_disk(5000):
        code, _, err = call(*INSPECT, str(page))
    assert code == 1 and err == f"mlx-snapkv: {page} can't be written: File too large\n"
    assert page.read_text() == '<meta name="generator" content="mlx-snapkv">'
    assert list(tmp_path.iterdir()) == [page]
