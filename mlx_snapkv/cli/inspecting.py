"""`mlx-snapkv inspect`: show which entries a policy keeps, and where the answer attends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..errors import SnapKVError
from ..paths import put_result
from . import cache_options, options
from .prompt_console import PromptConsole
from .prompts import PromptOptions
from .results import page_to_write

if TYPE_CHECKING:
    from rich.console import Console

    from ..measure.inspection import Inspection
    from ..measure.sentences import Sentence

SHADES = " ░▒▓█"
MIN_MAP_WIDTH = 8  # characters
MAX_MAP_WIDTH = 160  # characters
# Width of the vote share at the end of each map line, with a space on both sides.
SHARE_WIDTH = 7


@dataclass(frozen=True)
class InspectOptions(options.OutputOptions):
    """Options for the policies to inspect, and for the output page or picture."""

    snapkv: cache_options.Snapkv = None
    policy: Annotated[
        list[str] | None,
        Option(help="Policy to inspect, such as keydiff:budget=25%; give two to compare them."),
    ] = None
    output: Annotated[
        str | None,
        Option("--output", "-o", help="Write an interactive page (.html) or a picture (.png)."),
    ] = None


def inspect(
    *,
    model_options: options.ChatModelOptions,
    prompt: PromptOptions,
    max_tokens: options.MaxTokens = 256,
    prefill_step_size: cache_options.PrefillStepSize = 2048,
    inspect_options: InspectOptions,
) -> None:
    r"""Show what a policy keeps of a prompt, by layer, position and sentence, and where the answer attends.

    Each line is a layer and runs from the prompt's start to its end; brighter means that more heads keep the entries
    there. --output can write a page that shows the text, with each token tinted by the number of heads that keep it.
    The page is a single file and works offline. Decoding is greedy.

    \b
      mlx-snapkv inspect --model demo --prompt-file contract.txt --prompt "When does it end?" \
          --snapkv budget=6%,n_sink=4,n_window=32 -o kept.html
      mlx-snapkv inspect --model demo --prompt-file contract.txt --prompt "When does it end?" \
          --policy keydiff:budget=25% --policy streaming_llm:budget=25% -o kept.png
    """
    from ..measure.inspection import inspect_prompt
    from ..measure.inspection_page import page, write_picture
    from ..measure.sentences import special_tokens
    from ..planning.long_prompts import LongPrompts

    settings = cache_options.parse_settings(inspect_options.policy, inspect_options.snapkv)
    if len(settings) not in (1, 2):
        raise SnapKVError(f"--policy must be given once, or twice to compare, got {len(settings)}")
    path = page_to_write(inspect_options.output, ".html", ".png")
    console = PromptConsole(inspect_options.quiet)
    model, tokenizer, tokens = prompt.load(model_options, console)
    LongPrompts(model).require_memory(len(tokens), max_kv_bytes=model_options.max_kv_bytes)
    inspections = []
    for setting in settings:
        with console.bar() as update_bar:
            inspection = inspect_prompt(
                model,
                tokenizer,
                tokens,
                max_tokens,
                policy=setting,  # type: ignore[arg-type]
                prefill_step_size=prefill_step_size,
                prompt_progress_callback=update_bar,
            )
        inspections.append(inspection)
    if inspect_options.as_json:
        print(json.dumps(_to_dict(model_options.model, inspections), ensure_ascii=False))
    else:
        for i, inspection in enumerate(inspections):
            if i > 0:
                print("\n")
            _print_inspection(inspection)
    if path is not None:
        if path.suffix == ".png":
            write_picture(inspections, model_options.model, path)
        else:
            put_result(path, page(inspections, model_options.model, special_tokens(tokenizer)))
        console.say(f"wrote {path}")


def _to_dict(model_name: str, inspections: list[Inspection]) -> dict[str, Any]:
    """Return the object for --json."""
    any_inspection = inspections[0]  # all have the same prompt
    return {
        "model": model_name,
        "prompt_tokens": any_inspection.n_tokens,
        "text": any_inspection.text,
        "spans": any_inspection.spans,
        "policies": [inspection.to_dict() for inspection in inspections],
    }


def _print_inspection(inspection: Inspection) -> None:
    """Print an inspection: the report, the map of kept entries, the top sentences, and the answer."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(inspection.policy, style="bold")
    console.print(str(inspection.report), "", sep="\n")
    _print_map(inspection, console)
    if inspection.sentences:
        _print_sentences(inspection.sentences, console)
    console.print("Answer", style="bold")
    console.print(inspection.answer, soft_wrap=True)


def _print_sentences(sentences: Sequence[Sentence], console: Console) -> None:
    """Print the top sentences, one per line.

    Each line shows the sentence's share of the votes. If the policy has no votes, the line shows the share of the
    sentence's entries that was chosen.
    """
    from ..measure.inspection_page import SHOWN_SENTENCES

    top_sentence = sentences[0]
    if top_sentence.votes is not None:
        order_text = "by their share of the votes for the chosen entries"
    elif top_sentence.chosen:
        order_text = "by the share of their entries that was chosen"
    else:
        order_text = "no entry was chosen: these are always kept"
    console.print(f"Sentences kept most ({order_text})", style="bold")
    for rank, sentence in enumerate(sentences[:SHOWN_SENTENCES], start=1):
        share = sentence.votes or sentence.chosen
        share_text = f"{share:.1%}" if share else "fixed"
        text = " ".join(sentence.text.split())
        line = f"{rank:3}  {share_text:>5}  {text}"
        console.print(line, no_wrap=True, overflow="ellipsis")
    console.print()


def _print_map(inspection: Inspection, console: Console) -> None:
    """Print one line per layer, from the prompt's start to its end. A denser shade means that more entries are kept."""
    labels = [f"layer {layer}" for layer in inspection.layers]
    label_width = max(map(len, labels)) + 1
    free_width = console.width - label_width - SHARE_WIDTH
    map_width = max(MIN_MAP_WIDTH, min(MAX_MAP_WIDTH, free_width))
    densities = inspection.density(map_width)  # (layers, columns)
    for label, layer_densities, share in zip(labels, densities, inspection.shares, strict=True):
        shades = "".join(_shade(density) for density in layer_densities)
        share_text = "" if share is None else f"{share:5.0%}"
        console.print(f"{label:<{label_width}}{shades} {share_text}", no_wrap=True, crop=True)
    # Below the map, label its left and right ends with the numbers of the first and last token.
    first_token = "token 0"
    n_columns = densities.shape[1]
    last_token = f"token {inspection.n_tokens - 1}".rjust(n_columns - len(first_token) - 1)
    share_heading = "" if None in inspection.shares else " votes"
    axis = f"{'':<{label_width}}{first_token} {last_token}{share_heading}"
    console.print(axis, style="dim", no_wrap=True)
    other_layers = inspection.layers_without
    if other_layers:
        noun = "layer" if len(other_layers) == 1 else "layers"
        numbers = ", ".join(map(str, other_layers))
        why = "no entries to keep or drop (linear attention, or a sliding window)"
        console.print(f"{noun} {numbers}: {why}", style="dim")
    console.print()


def _shade(density: float) -> str:
    """Return the character for a share of kept entries, from 0 to 1."""
    # The square root makes low densities visible: half of the shades cover the lowest quarter of densities.
    return SHADES[ceil(density**0.5 * (len(SHADES) - 1))]
