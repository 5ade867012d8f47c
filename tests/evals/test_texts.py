"""Which files give which pieces."""

import pytest

from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.evals.texts import Texts, read_texts


class Letters:
    """A tokenizer of single characters."""

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return [ord(c) for c in text]


@pytest.fixture
def folder(tmp_path):
    files = {
        "b.txt": "abcdefghijklmnopqrstuvwxyz",
        "a/long.md": "0123456789" * 5,
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
    texts = Texts([str(folder)], read_texts([str(folder)]))
    pieces = texts.pieces(Letters(), 8, 4, 99)
    assert [told(piece) for piece in pieces] == [
        ("a/long.md", 1, "01234567", "8901"),
        ("b.txt", 1, "abcdefgh", "ijkl"),
        ("a/long.md", 2, "23456789", "0123"),
        ("b.txt", 2, "mnopqrst", "uvwx"),
        ("a/long.md", 3, "45678901", "2345"),
        ("a/long.md", 4, "67890123", "4567"),
    ]
    assert texts.left_out == "Files left out: 2 not UTF-8 text, 2 shorter than a piece."


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_more_pieces_go_on_where_fewer_end(folder, most):
    texts = Texts(["x"], read_texts([str(folder)]))
    assert texts.pieces(Letters(), 8, 4, most) == texts.pieces(Letters(), 8, 4, 99)[:most]


def test_texts_that_nobody_looked_at_are_not_left_out(folder):
    texts = Texts(["x"], [["long", "abcd" * 9], ["short", "a"]])
    texts.pieces(Letters(), 8, 4, 1)
    assert texts.left_out is None
    texts.pieces(Letters(), 8, 4, 2)
    assert texts.left_out == "Files left out: 1 shorter than a piece."


def test_files_are_read_as_they_are_given(folder):
    given = [str(folder / "b.txt"), str(folder / "a"), str(folder / "b.txt")]
    assert [name for name, _ in read_texts(given)] == [given[0], "long.md", "short.py"]
    assert read_texts([str(folder / "marked.txt")])[0][1] == "marked"


def test_other_texts_have_another_digest(folder):
    first = Texts(["x"], read_texts([str(folder)])).digest
    assert first == Texts(["y"], read_texts([str(folder)])).digest
    (folder / "b.txt").write_text("other")
    assert first != Texts(["x"], read_texts([str(folder)])).digest


@pytest.mark.parametrize(
    "name, words",
    [
        ("nowhere", "--text .*nowhere: No such file"),
        ("picture.png", "is not UTF-8 text: convert it to text first"),
        ("zero", "is not UTF-8 text"),
    ],
)
def test_mistakes(folder, name, words):
    with pytest.raises(SnapKVError, match=words):
        read_texts([str(folder / name)])


@pytest.mark.parametrize("named", [[], [["p", None]], [["p", ""]]])
def test_no_text_is_a_mistake(named):
    with pytest.raises(SnapKVError, match="--text x: there is no UTF-8 text"):
        Texts(["x"], named)


def test_texts_that_are_too_short_are_told(folder):
    texts = Texts(["x"], [["a", "\u00e9" * 10]])
    texts.require_length(20)  # bytes: it may have so many tokens
    with pytest.raises(SnapKVError, match="no text has the 21 tokens of a piece"):
        texts.require_length(21)
    with pytest.raises(SnapKVError, match=r"no text has the 12 tokens .* a lower --length"):
        texts.pieces(Letters(), 8, 4, 9)
