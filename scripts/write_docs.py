"""Write the generated docs: the pages about policies, commands and models, and the tables in other pages.

python scripts/write_docs.py     # or: make docs
"""

import re

import policies_page
import quality_page
import tables
import typer
from results_page import ROOT, load, table
from typer.cli import get_docs_for_click

from mlx_snapkv.cli.app import app
from mlx_snapkv.models.table import REFUSED, SUPPORTED, refused_types, supported_types

NAME = "mlx-snapkv"
COMMANDS = """# The commands

Look up here every flag of every command. `python scripts/write_docs.py` generates this page from the command line
itself; `mlx-snapkv COMMAND --help` prints the same texts. An error is one line on stderr. The exit code is 2.
It is 1 if the system fails (such as a full disk) or requests of a batch fail, and 130 after Ctrl-C.
"""

MODELS = """# Model types

Look up here whether your model's type can be compressed, and whether it can use sparse attention. \
{n_supported} of mlx-lm's model types can be compressed, and {n_refused} are refused by name. \
{n_sparse} of those that can be compressed can also use sparse attention. \
The conformance test (`tests/models/test_conformance.py`) runs each supported type as a tiny random model. \
It checks three things: the recorded queries equal those of the attention call bit for bit, \
the votes equal those of its softmax, and decoding with all entries kept equals mlx-lm's. \
Real checkpoints were tested only for `llama` (SmolLM2), `gemma3_text` (Gemma 3) and `qwen2` (Qwen2.5-Coder). \
The built-in models are of the types `llama` and `qwen3_next`.

`python scripts/write_docs.py` generates this page; `mlx-snapkv models` prints the same tables.

## Supported

{supported}

## Special model types

- **Latent entries (MLA).** A layer stores one latent for all heads, and the positional part of one key. A policy sees \
both concatenated as the key, and the latent as the value. Queries multiply this key after the head's `embed_q` \
and RoPE. All policies are therefore defined as usual. Statistics of queries (`expected_attention`) are exact too, but \
large: per layer, `n_heads` times the square of a key's size.
- **Layers that read other layers' entries.** Their queries vote together with those of the layer that owns the \
entries. All reading heads have the same weight.
- **No sparse attention.** Sparse attention replaces mlx-lm's attention function for one layer's cache. Model types \
marked "no sparse attention" compute with the entries before they call this function, or call another one. `--sparse` \
is then refused in one sentence; policies work.
- **Capped logits** (gemma2). Votes are computed from the capped logits; `expected_attention` is refused.
- **Quantised entries** (`kv_bits`, `store=8bit`) are refused if mlx-lm's forward pass reads plain entries: \
with latents, in gemma2, plamo2 and iquestloopcoder, and in gemma4 with borrowing layers.
- **`rope_parameters`.** transformers 5 writes RoPE's base and scaling into `config.json` under this one name. Most of \
mlx-lm's families read `rope_theta`, `rope_scaling` and `partial_rotary_factor` instead, and without them fall back on \
defaults that make answers nonsense. Every command passes the values on under the names that the family reads, and \
says so in one line. A model is refused if its family has no name for one of them. Families that read \
`rope_parameters` themselves are left alone. Several Macs need mlx-lm's own names in `config.json`.

## Refused

{refused}
"""


def pages() -> dict[str, str]:
    """Return the contents of all generated files, keyed by path."""
    contents = {
        "docs/policies.md": policies_page.page(),
        "docs/commands.md": commands_page(),
        "docs/models.md": models_page(),
        "docs/quality.md": quality_page.page(load("quality")),
    }
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if "<!-- " in text:
            contents[str(path.relative_to(ROOT))] = tables.filled(text)
    return contents


def models_page() -> str:
    """Return docs/models.md."""
    return MODELS.format(
        n_supported=len(SUPPORTED),
        n_refused=len(REFUSED),
        n_sparse=sum(not any(f.no_sparse for f in families) for families in SUPPORTED.values()),
        supported="\n".join(table(("model type", "also loads", "note"), supported_types())),
        refused="\n".join(table(("model type", "also loads", "why"), refused_types())),
    )


def commands_page() -> str:
    """Return docs/commands.md from typer's generator, without usage lines and types."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name=NAME), name=NAME)
    text = re.sub(r"\*\*Usage\*\*:\n\n```console\n.*?```\n\n", "", text, flags=re.S)
    text = re.sub(r"\* `--help`: Show this message and exit\.\n", "", text)
    text = re.sub(r"\*\*Options\*\*:\n\n(?!\*)", "", text)
    text = re.sub(r" <[^>`]*>`", "`", text)
    # Turn examples into code blocks.
    text = re.sub(rf"^(?:\x08\n|(?=\s*{NAME} ))((?:.+\n)+)", _code_block, text, flags=re.M)
    return COMMANDS + text.partition("\n")[2].rstrip() + "\n"


def _code_block(match: re.Match[str]) -> str:
    """Return an example from a help text as a code block."""
    example = match[1]
    lines = (line.removeprefix("  ") for line in example.splitlines())
    return "\n".join(["```", *lines, "```", ""])


if __name__ == "__main__":
    for path, text in pages().items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(f"wrote {path}")
