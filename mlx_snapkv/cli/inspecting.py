"""`mlx-snapkv inspect`: what a policy kept of a prompt, and where the answer looked."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SnapKVError
from ..paths import require_place
from ..whole_files import put_result
from . import flags
from .generation import adapt_tokenizer
from .loading import load_model
from .prompt_text import encode, read_prompt
from .waiting import TOKENISING, waited_for

if TYPE_CHECKING:
    from ..inspecting.inspection import Inspection

ENDINGS = (".html", ".png")
MOST = 2  # policies side by side

Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", metavar="POLICY", help="As for generate; give two to compare them."),
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="A page to look around in (.html), or a picture for a paper (.png).",
    ),
]


def inspect(
    model: flags.Model,
    prompt: flags.Prompt = None,
    prompt_file: flags.PromptFile = None,
    system_prompt: flags.SystemPrompt = None,
    prefill_response: flags.PrefillResponse = None,
    chat_template_config: flags.ChatTemplateConfig = None,
    extra_eos_token: flags.ExtraEosToken = None,
    max_tokens: flags.MaxTokens = 256,
    prefill_step_size: flags.PrefillStepSize = 2048,
    ignore_chat_template: flags.IgnoreChatTemplate = False,
    adapter_path: flags.AdapterPath = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    snapkv: flags.Snapkv = None,
    policy: Policies = None,
    output: Output = None,
    quiet: flags.Quiet = False,
    json_output: flags.AsJson = False,
) -> None:
    """Show what a policy keeps of a prompt: by layer and position, by sentence, and where the answer looked.

    A line a layer, the prompt from left to right, the brighter the more heads keep what is there. The page has the text
    itself, each token tinted by the heads that keep it; it is one file and needs no network. The answer is greedy.

    \b
      mlx-snapkv inspect --model demo --prompt-file contract.txt --prompt "When does it end?" \\
          --snapkv budget=6%,n_sink=4,n_window=32 -o kept.html
      mlx-snapkv inspect --model demo --prompt-file contract.txt --prompt "When does it end?" \\
          --policy keydiff:budget=25% --policy streaming_llm:budget=25% -o kept.png
    """
    from ..inspecting.prompt import inspect_prompt
    from .progress import PrefillBar, stderr_console

    chosen = _policies(snapkv, policy)
    path = None if output is None else _place(output)
    text = read_prompt(prompt, prompt_file)
    loaded, tokenizer = load_model(model, adapter_path, trust_remote_code)
    adapt_tokenizer(tokenizer, extra_eos_token, chat_template_config)
    console = stderr_console(quiet)
    encoded = partial(
        encode,
        tokenizer,
        text,
        system_prompt,
        ignore_chat_template,
        prefill_response=prefill_response,
    )
    tokens = waited_for(console, TOKENISING, encoded)
    found = []
    for each in chosen:
        bar = PrefillBar(console)
        try:
            found.append(
                inspect_prompt(
                    loaded,
                    tokenizer,
                    tokens,
                    max_tokens,
                    policy=each,
                    prefill_step_size=prefill_step_size,
                    prompt_progress_callback=bar.update,
                )
            )
        finally:
            bar.close()
    if json_output:
        print(json.dumps(_as_json(model, found), ensure_ascii=False))
    else:
        _show(found)
    if path is not None:
        _write(found, model, tokenizer, path)
        if not quiet:
            print(f"wrote {path}", file=sys.stderr)


def _policies(snapkv: str | None, policies: list[str] | None) -> list[Any]:
    """Raises: SnapKVError: there is none, or there are too many."""
    from ..policies import resolve_policy

    chosen = [resolve_policy(policy=text) for text in policies or []]
    if snapkv is not None:
        chosen.insert(0, resolve_policy(snapkv))
    if not chosen:
        raise SnapKVError(
            "nothing to inspect: give a --policy, such as keydiff:budget=25%, or --snapkv"
        )
    if len(chosen) > MOST:
        raise SnapKVError(f"at most {MOST} policies fit side by side, got {len(chosen)}")
    return chosen


def _place(name: str) -> Path:
    """Where to write; SnapKVError if nothing can be, or it is not ours to replace."""
    from ..reporting import files

    path = Path(name)
    if path.suffix not in ENDINGS:
        raise SnapKVError(f"--output must end in .html or .png, got {name!r}")
    if path.suffix == ".png":
        files.require_matplotlib()
    if require_place(path) and not files.is_ours(path):
        raise SnapKVError(
            f"--output {path} is there already, and mlx-snapkv did not write it: give another name"
        )
    return path


def _show(found: list[Inspection]) -> None:
    from .kept_map import print_inspection

    for i, each in enumerate(found):
        if i:
            print("\n")
        print_inspection(each)


def _write(found: list[Inspection], model: str, tokenizer: Any, path: Path) -> None:
    from ..inspecting.page import page
    from ..inspecting.picture import write_picture
    from ..inspecting.spans import special_tokens

    if path.suffix == ".png":
        write_picture(found, model, path)
    else:
        put_result(path, page(found, model, special_tokens(tokenizer)))


def _as_json(model: str, found: list[Inspection]) -> dict[str, Any]:
    one = found[0]
    return {
        "model": model,
        "prompt_tokens": one.n_tokens,
        "text": one.text,
        "spans": one.spans,
        "policies": [each.to_dict() for each in found],
    }
