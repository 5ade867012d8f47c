"""Send requests through every entry point of a copy of the package whose sparse attention has an extra option, `tint`.

Each printed line names an entry point and the values of `tint` with which its requests were planned.
"""

import contextlib
import io
import json
import os
import sys
import threading
from pathlib import Path

import httpx
import mlx.core as mx
from mlx_lm import load

import mlx_snapkv
from mlx_snapkv import SnapKVError
from mlx_snapkv.cli import app
from mlx_snapkv.demo import MODELS
from mlx_snapkv.planning.request_plan import SEEN
from mlx_snapkv.server import app as server

SPARSE = "budget=16,n_sink=4,n_window=8"
DARK = f"{SPARSE},tint=dark"
TEXT = "The access code of the amber falcon is 482913. It was cold. " * 12
QUESTION = "What is the access code of the amber falcon?"
ASKED = ["--model", "demo", "--prompt", TEXT, "-m", 2]


def tell(entrance):
    """Print the values of `tint` seen since the last call."""
    print(f"{entrance}: {' '.join(map(str, dict.fromkeys(SEEN))) or 'nothing'}", flush=True)
    SEEN.clear()


def command(*words, lines=()):
    """Run a command, and return its exit code, stdout and stderr."""
    sys.argv = ["mlx-snapkv", *map(str, words)]
    sys.stdin = io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode()))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app.main()
        except SystemExit as end:
            return end.code, out.getvalue(), err.getvalue()
    raise AssertionError("a command ends by SystemExit")


def run(entrance, *words, lines=()):
    code, out, err = command(*words, lines=lines)
    assert code == 0, f"{entrance}: {out}{err}"
    tell(entrance)


def call(entrance, function, *args, **options):
    result = function(*args, sparse=DARK, **options)
    if not isinstance(result, (str, tuple, mlx_snapkv.Conversation)):
        list(result if hasattr(result, "__next__") else [])
    tell(entrance)
    try:
        function(*args, sparse={"tint": "pink"}, **options)
    except SnapKVError as error:
        print(f"{entrance} refuses: {error}")
    return result


def python(model, tokenizer):
    tokens = tokenizer.encode(TEXT)
    call("generate_step", mlx_snapkv.generate_step, mx.array(tokens), model, max_tokens=2)
    call("stream_generate", mlx_snapkv.stream_generate, model, tokenizer, TEXT, max_tokens=2)
    call("generate", mlx_snapkv.generate, model, tokenizer, TEXT, max_tokens=2)
    call("prefill", mlx_snapkv.prefill, model, tokens)
    call(
        "batch_generate",
        mlx_snapkv.batch_generate,
        model,
        tokenizer,
        [tokens, tokens],
        max_tokens=2,
    )
    chat = call("Conversation()", mlx_snapkv.Conversation, model, tokenizer, max_tokens=2)
    list(chat.send(TEXT))
    tell("Conversation.send")


def commands(folder):
    run("generate", "generate", *ASKED, "--sparse", DARK)
    run("compare", "compare", *ASKED, "--sparse", DARK)
    with open(folder / "r.jsonl", "w") as file:
        body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
        request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        file.write(json.dumps(request))
    options = ["--model", "demo", "--sparse", DARK]
    run("batch", "batch", folder / "r.jsonl", "-o", folder / "a.jsonl", *options)
    chat, said = ["chat", *options, "-m", 2], folder / "chat.safetensors"
    run("chat", *chat, lines=[TEXT])
    run("/reset", *chat, lines=["/reset", TEXT])
    run("/system", *chat, lines=["/system Be brief.", TEXT])
    run("/load of a text", *chat, lines=[f"/load {saved(folder, 'plain')}", QUESTION])
    run("/save", *chat, lines=[TEXT, f"/save {said}"])
    chat = ["chat", "--model", "demo", "-m", 2]
    run("/policy", *chat, lines=[f"/policy sparse:{DARK}", TEXT])
    run("/load of a chat", *chat, lines=[f"/load {said}", QUESTION])
    text = saved(folder, "text", "--sparse", DARK)
    tell("cache-prompt")
    run("/load of a tinted text", *chat, lines=[f"/load {text}", QUESTION])
    asked = ["generate", "--model", "demo", "--prompt", QUESTION, "-m", 2]
    run("--prompt-cache-file", *asked, "--prompt-cache-file", text)


def saved(folder, name, *options):
    file = folder / f"{name}.safetensors"
    code, _, err = command(
        "cache-prompt", "--model", "demo", "--prompt", TEXT, "-o", file, *options
    )
    assert code == 0, err
    if not options:
        SEEN.clear()
    return file


def settings(folder):
    (folder / "mlx-snapkv").mkdir()
    (folder / "mlx-snapkv" / "config.toml").write_text(f'sparse = "{DARK}"\n')
    os.environ["XDG_CONFIG_HOME"] = str(folder)
    run("config.toml", "generate", *ASKED)
    os.environ["MLX_SNAPKV_SPARSE"] = f"{SPARSE},tint=dim"
    run("variable", "generate", *ASKED)
    run("flag", "generate", *ASKED, "--sparse", DARK)
    del os.environ["XDG_CONFIG_HOME"], os.environ["MLX_SNAPKV_SPARSE"]


def serve(folder):
    """Query servers that share a prefix folder. A server with another tint must not use what the first one has read."""
    cached, real = [], server.serve

    def asked(engine, settings, place, on_start):
        def ask(running):
            url = f"http://127.0.0.1:{place.getsockname()[1]}/v1/chat/completions"
            body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
            found = httpx.post(url, json=body, timeout=60).json()
            cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
            running.should_exit = True

        def start(running):
            threading.Thread(target=ask, args=(running,)).start()

        real(engine, settings, place, start)

    server.serve = asked
    words = ["serve", "--model", "demo", "--port", 0, "--prefix-dir", folder / "prefixes"]
    for tint in ("dark", "dim", "dark"):
        run("serve", *words, "--sparse", f"budget=64,tint={tint}")
    print(f"known to servers: {cached}")


def refusals():
    """Pass a wrong tint to every command that reads prompts. Each must name it before loading a model."""
    words = {
        "generate": ["--prompt", "x"],
        "compare": ["--prompt", "x"],
        "chat": [],
        "batch": ["r.jsonl", "-o", "a.jsonl"],
        "serve": [],
        "cache-prompt": ["--prompt", "x", "-o", "x.safetensors"],
    }
    for name, more in words.items():
        code, _, err = command(name, *more, "--model", "none", "--sparse", "tint=pink")
        print(f"{name} ends with {code}: {err.strip()}")


def main(folder):
    folder = Path(folder)
    print(mlx_snapkv.__file__)
    model, tokenizer = load(str(MODELS["demo"]))
    model.set_dtype(mx.float32)  # a CPU computes it faster than half precision
    python(model, tokenizer)
    commands(folder)
    settings(folder)
    serve(folder)
    refusals()
