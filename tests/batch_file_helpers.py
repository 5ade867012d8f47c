"""Helpers for tests of the batch command, which write request files and read answer files."""

import json

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FACT = "The access code of the amber falcon is 482913. "
COLD = "It was cold at the market. "
SNAPKV = "snapkv:top_k=24,n_window=32,obs_window=32,lookahead=4"


def line(custom_id, url=CHAT, /, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id, n, /, **body):
    """Return a chat request with a fact, `n` sentences, and a question about the fact."""
    text = FACT + COLD * n + "What is the access code of the amber falcon?"
    return line(custom_id, messages=[{"role": "user", "content": text}], **body)


def text(custom_id, n, /, **body):
    """Return a completion request with a fact, `n` sentences, and the beginning of the fact's sentence."""
    prompt = FACT + COLD * n + "The access code of the amber falcon is"
    return line(custom_id, COMPLETIONS, prompt=prompt, **body)


def write(path, lines):
    """Write objects, bytes and strings to a file, one per line. Return the file's path."""
    data = [item if isinstance(item, (str, bytes)) else json.dumps(item) for item in lines]
    path.write_bytes(b"".join((d if isinstance(d, bytes) else d.encode()) + b"\n" for d in data))
    return path


def read(path):
    """Return the records of an answer file by their `custom_id`."""
    records = [json.loads(raw) for raw in path.read_text().splitlines()]
    found = {record["custom_id"]: record for record in records}
    assert len(found) == len(records), "a custom_id twice"
    return found


def said(record):
    """Return a record's answer or error, without the fields that differ from run to run."""
    if record["error"]:
        return record["error"]
    body = record["response"]["body"]
    return body["choices"], body["usage"], body["mlx_snapkv"], body["model"], body["object"]


def answer(record):
    """Return an answer's text."""
    choice = record["response"]["body"]["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]
