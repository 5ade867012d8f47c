"""Files are split into pieces of text."""

import pytest

from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.measure.texts import Texts


class Letters:
    """A tokenizer with one token per character."""

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return [ord(c) for c in text]


@pytest.fixture
def folder(tmp_path):
    files = {
        "b.txt": "abcdefghijklmnopqrstuvwxyz",
        "a/long.md": "0123456789" * 4,
        "a/short.py": "tiny",
        "empty.txt": " \n",
        ".hidden/x.txt": "z" * 99,
        "marked.txt": "\ufeffmarked",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\0")
    (tmp_path / "zero").write_bytes(b"text\0")
    return tmp_path


def told(piece):
    tokens, following = ("".join(map(chr, ids)) for ids in (piece.tokens, piece.following))
    return piece.document, piece.number, tokens, following


def test_the_first_piece_of_each_text_comes_before_the_second_of_any(folder):
    texts = Texts([str(folder)])
    pieces = texts.pieces(Letters(), 8, 4, 99)
    assert [told(piece) for piece in pieces] == [
        ("a/long.md", 1, "01234567", "8901"),
        ("b.txt", 1, "abcdefgh", "ijkl"),
        ("a/long.md", 2, "23456789", "0123"),
        ("b.txt", 2, "mnopqrst", "uvwx"),
        ("a/long.md", 3, "45678901", "2345"),
    ]
    assert texts.n_unread == 2
    for most in (1, 2, 4):
        assert texts.pieces(Letters(), 8, 4, most) == pieces[:most]
    (folder / "b.txt").write_text("other")
    assert Texts([str(folder)]).digest != texts.digest


def test_files_are_read_once_and_named_as_given_or_relative_to_their_folder(folder):
    given = [str(folder / "b.txt"), str(folder / "a"), str(folder / "b.txt")]
    texts = Texts(given)
    assert [p.document for p in texts.pieces(Letters(), 8, 4, 2)] == [given[0], "long.md"]
    (piece,) = Texts([str(folder / "marked.txt")]).pieces(Letters(), 4, 2, 9)
    assert told(piece)[2:] == ("mark", "ed")  # without its byte order mark


@pytest.mark.parametrize(
    "name, words",
    [
        ("nowhere", "--text .*nowhere: No such file"),
        ("picture.png", "is not UTF-8 text: convert it first"),
        ("zero", "is not UTF-8 text"),
        ("empty.txt", "--text .*empty.txt: there is no UTF-8 text"),
        ("marked.txt", "no text has the 12 tokens .* a lower --length"),
    ],
)
def test_an_unusable_text_is_one_sentence(folder, name, words):
    with pytest.raises(SnapKVError, match=words):
        Texts([str(folder / name)]).pieces(Letters(), 8, 4, 9)
