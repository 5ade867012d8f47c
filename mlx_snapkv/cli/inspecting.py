"""`mlx-snapkv inspect`: what a policy kept of a prompt, and where the answer looked."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..errors import SnapKVError
from ..paths import put_result, require_place
from . import cache_options, options
from .reading import Reading

if TYPE_CHECKING:
    from ..inspecting.inspection import Inspection

ENDINGS = (".html", ".png")
MOST = 2  # policies side by side


def inspect(
    *,
    model: options.ModelOptions,
    prompt: options.PromptOptions,
    tokenizer: options.TokenizerOptions,
    max_tokens: options.MaxTokens = 256,
    prefill_step_size: cache_options.PrefillStepSize = 2048,
    snapkv: cache_options.Snapkv = None,
    policy: Annotated[
        list[str] | None,
        Option("--policy", metavar="POLICY", help="As for generate; give two to compare them."),
    ] = None,
    output: Annotated[
        str | None,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help="A page to look around in (.html), or a picture for a paper (.png).",
        ),
    ] = None,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
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
    from ..inspecting.inspection import inspect_prompt
    from .kept_map import print_inspections

    chosen = _policies(snapkv, policy)
    path = None if output is None else require_page(output)
    text = prompt.read()
    loaded, adapted = model.load()
    tokenizer.adapt(adapted)
    reading = Reading(quiet)
    tokens = reading.wait_for(partial(prompt.encode, adapted, text))
    asked = loaded, adapted, tokens, max_tokens
    found = []
    for each in chosen:
        with reading.bar() as update:
            keywords = {"policy": each, "prompt_progress_callback": update}
            found.append(inspect_prompt(*asked, prefill_step_size=prefill_step_size, **keywords))
    if as_json:
        print(json.dumps(_as_json(model.model, found), ensure_ascii=False))
    else:
        print_inspections(found)
    if path is not None:
        _write(found, model.model, adapted, path)
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


def require_page(name: str, endings: Sequence[str] = ENDINGS) -> Path:
    """Where to write; SnapKVError if nothing can be, or it is not ours to replace."""
    from ..reporting import files

    path = Path(name)
    if path.suffix not in endings:
        raise SnapKVError(f"--output must end in {' or '.join(endings)}, got {name!r}")
    if path.suffix == ".png":
        files.require_matplotlib()
    if require_place(path) and not files.is_ours(path):
        raise SnapKVError(
            f"--output {path} is there already, and mlx-snapkv did not write it: give another name"
        )
    return path


def _write(found: list[Inspection], model: str, tokenizer: Any, path: Path) -> None:
    from ..inspecting.page import page
    from ..inspecting.picture import write_picture
    from ..inspecting.sentences import special_tokens

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
