"""Data in kvpress's columns: files and folders, mistakes in rows, and prompts built from rows."""

import json
import sys

import pyarrow
import pytest
from evaluation.columns import (
    Row,
    columns,
    read_columns,
    require_room,
    score_of,
)
from pyarrow import parquet

from mlx_snapkv.errors import SnapKVError

ROW = {
    "context": "The code is 4711. The sky is blue.\n",
    "question": "What is the code?",
    "answer_prefix": " The code is",
    "answer": ["4711"],
    "max_new_tokens": 8,
    "task": "niah_single_1",
}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ["d.parquet", "d.jsonl"])
def test_rows_of_one_context_are_one_document(tmp_path, name):
    other = ROW | {"question": "What is blue?", "answer": ["sky"]}
    data = write(tmp_path / name, [ROW, ROW | {"context": "Nothing."}, other])
    if name.endswith("l"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    documents, _ = read_columns(data)
    assert [rows[0].context for rows in documents] == [ROW["context"], "Nothing."]
    assert [row.question for row in documents[0]] == [ROW["question"], "What is blue?"]
    assert documents[0][0].model_dump() == ROW | {"length": None}


def test_a_folder_of_files_gives_lengths_and_tasks(tmp_path):
    """Folders name lengths, and rows or files name tasks. `most` limits the documents per combination."""
    bare = {key: value for key, value in ROW.items() if key not in ("task", "answer_prefix")}
    rows = [ROW | {"context": f"Text {i}."} for i in range(3)]
    write(tmp_path / "4096" / "test-00000-of-00001.parquet", rows)
    write(tmp_path / "2048" / "vt.jsonl", [bare | {"answer": "4711"}])
    write(tmp_path / "passkey" / "test.jsonl", [{**bare, "answers": ["1"], "answer": None}])
    documents, copy = read_columns(str(tmp_path), max_documents=2)
    assert [(rows[0].task, rows[0].length, rows[0].context) for rows in documents] == [
        ("passkey", None, ROW["context"]),
        ("vt", 2048, ROW["context"]),
        ("niah_single_1", 4096, "Text 0."),
        ("niah_single_1", 4096, "Text 1."),
    ]
    assert documents[0][0].answer == ["1"] and documents[1][0].answer == ["4711"]
    chosen, again = read_columns(str(tmp_path), ["vt"])
    assert [rows[0].task for rows in chosen] == ["vt"] and again == copy


def test_a_few_lengths_are_targets_and_many_are_just_sizes_of_texts(tmp_path):
    for given, told in ((4096, 2048), [2048, 4096]), (range(1, 20), [None] * 19):
        rows = [ROW | {"length": n, "context": f"Text {n}."} for n in given]
        documents, _ = read_columns(write(tmp_path / "a.jsonl", rows))
        assert [rows[0].length for rows in documents] == told


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("d.jsonl", {"context": None}, "context: Field required; every row needs context, quest"),
        ("d.jsonl", {"answer": [1]}, "answer.0: Input should be a valid string"),
        ("d.jsonl", b"", "d.jsonl has no rows"),
        ("d.jsonl", b"\xff\n", "line 1 is not a JSON object in UTF-8"),
        ("d.jsonl", b"[" * 100_000, "line 1 is not a JSON"),
        ("d.parquet", b"no table", "d.parquet is damaged or not a parquet file"),
        ("d.txt", b"a", "no such file, and no folder with .parquet or .jsonl files"),
    ],
)
def test_unusable_data_is_refused_by_name(tmp_path, name, content, words):
    if isinstance(content, dict):
        write(tmp_path / name, [ROW, ROW | content])
        words = f"{tmp_path / name}: row 2: {words}"
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SnapKVError) as error:
        read_columns(str(tmp_path))
    assert words in str(error.value)


def test_an_unknown_task_and_a_missing_package_are_refused(tmp_path, monkeypatch):
    data = write(tmp_path / "d.jsonl", [ROW])
    with pytest.raises(SnapKVError, match="--task must be one of niah_single_1, got 'vt'"):
        read_columns(data, ["vt"])
    (tmp_path / "d.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SnapKVError, match=r"parquet needs pyarrow: run pip install -e '\.\[dev"):
        read_columns(str(tmp_path))


@pytest.mark.parametrize("template", [True, False])
def test_the_prompt_equals_kvpresss(demo_llama, tmp_path, template):
    """Context and question form the user's turn, the answer's prefix follows, and each part is tokenised separately."""
    tokenizer = demo_llama[1]
    documents, copy = read_columns(write(tmp_path / "d.jsonl", [ROW]))
    dataset = columns(tokenizer, documents, copy, template)
    assert dataset.places == [{"task": "niah_single_1", "length": None, "document": 0}]
    document = dataset.make(dataset.places[0])
    (question,) = document.questions
    before, between = ("<|bos|><|user|>", "<|assistant|>") if template else ("<|bos|>", "\n")
    head = tokenizer.encode(before + ROW["context"], add_special_tokens=False)
    tail = f"What is the code?{between} The code is"
    assert question.prompt == head + tokenizer.encode(tail, add_special_tokens=False)
    assert (document.n_shared, question.max_tokens) == (len(head), 8)
    assert question.score(" 4711.") == 1 and question.score("471") == 0


def test_documents_beyond_the_models_length_are_refused(demo_llama, tmp_path):
    model, tokenizer = demo_llama
    rows = [ROW, ROW | {"context": ROW["context"] * 2000}]
    documents, copy = read_columns(write(tmp_path / "d.jsonl", rows))
    with pytest.raises(SnapKVError, match=r"has a prompt of \d+ tokens .* trained length is \d+"):
        require_room(model, columns(tokenizer, documents, copy), documents)
    require_room(model, columns(tokenizer, documents[:1], copy), documents[:1])


ALL, PART = "niah_multivalue", "qa_2"
SCORES = [
    (ALL, ["12", "ab"], " It is AB\x00 and 12.", 1),
    ("a task of one's own", ["12", "ab"], "AB only", 0.5),
    (PART, ["12", "ab"], "AB only", 1),
    (ALL, ["onetwo"], "one\ntwo", 1),  # kvpress drops control characters
    (ALL, ["12", "12", "34"], "12,", 2 / 3),  # repeated references count each time
]


@pytest.mark.parametrize("task, references, output, wanted", SCORES)
def test_scores_equal_values_computed_by_hand(task, references, output, wanted):
    row = ROW | {"task": task, "answer": references}
    assert score_of(Row(**row, length=None))(output) == pytest.approx(wanted)
