"""Options that several commands share or that are mlx-lm's own, each declared once."""

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..demo import MODELS
from ..errors import SnapKVError
from ..paths import path_of


def _possible(kv_bits: int | None) -> int | None:
    """Raises: SnapKVError: entries can't have so many bits."""
    if kv_bits not in (None, 2, 3, 4, 6, 8):
        raise SnapKVError(f"--kv-bits must be 2, 3, 4, 6 or 8, got {kv_bits}")
    return kv_bits


def _possible_group(kv_group_size: int) -> int:
    """Raises: SnapKVError: mlx has no such groups."""
    if kv_group_size not in (32, 64, 128):
        raise SnapKVError(f"--kv-group-size must be 32, 64 or 128, got {kv_group_size}")
    return kv_group_size


def _is_true(verbose: str) -> str:
    """Raises: SnapKVError: it is none of the words that mlx-lm takes."""
    if verbose.lower() not in ("true", "t", "false", "f"):
        raise SnapKVError(f"--verbose must be True or False, got {verbose!r}")
    return verbose


def _store_in(folder: Path | None) -> Path | None:
    """Let temporary files be made there."""
    if folder is not None:
        folder = path_of(folder, "--store-dir")
        if not folder.is_dir():
            raise SnapKVError(f"--store-dir {folder} is no folder: make it, or give another one")
        if not os.access(folder, os.W_OK):
            raise SnapKVError(f"--store-dir {folder} can't be written to: give another folder")
        tempfile.tempdir = str(folder)
    return folder


Model = Annotated[
    str, typer.Option(help=f"Model folder, Hugging Face repository, or: {', '.join(MODELS)}.")
]
AdapterPath = Annotated[str | None, typer.Option(help="Folder of LoRA adapters.")]
QuantizeActivations = Annotated[
    bool,
    typer.Option(
        "--quantize-activations", "-qa", help="Quantise activations as their layers' weights are."
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow a tokenizer's own code.")
]
Pipeline = Annotated[
    bool,
    typer.Option(
        "--pipeline",
        help="On several Macs, started by mlx.launch: each has some of the layers, instead of a slice of each.",
    ),
]
DraftModel = Annotated[
    str | None, typer.Option(help="Small model of the same tokenizer that proposes tokens.")
]
NumDraftTokens = Annotated[
    int, typer.Option(min=1, help="Tokens that the draft model proposes at a time.")
]

Prompt = Annotated[str | None, typer.Option("--prompt", "-p", help="Text, or - for stdin.")]
PromptFile = Annotated[
    str | None, typer.Option(help="Text file to read; a --prompt is put after it.")
]
PromptCacheFile = Annotated[
    str | None, typer.Option(help="A prompt saved by cache-prompt, to be continued.")
]
SystemPrompt = Annotated[str | None, typer.Option(help="System message of the chat template.")]
IgnoreChatTemplate = Annotated[
    bool, typer.Option("--ignore-chat-template", help="Give the prompt as raw text.")
]
PrefillStepSize = Annotated[int, typer.Option(min=1, help="Prompt tokens read at a time, at most.")]

MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-m", min=1, help="Tokens of an answer, at most.")
]
Temp = Annotated[float, typer.Option(min=0, max=100, help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[float, typer.Option(min=0, max=1, help="Sampling top-p; 1 is off.")]
MinP = Annotated[float, typer.Option(min=0, max=1, help="Sampling min-p; 0 is off.")]
TopK = Annotated[int, typer.Option(min=0, help="Sampling top-k; 0 is off.")]
MinTokensToKeep = Annotated[int, typer.Option(min=1, help="Tokens that min-p keeps at least.")]
XtcProbability = Annotated[float, typer.Option(min=0, max=1, help="XTC probability.")]
XtcThreshold = Annotated[float, typer.Option(min=0, max=0.5, help="XTC threshold.")]
ExtraEosToken = Annotated[
    list[str] | None,
    typer.Option(help="Token that also ends an answer; repeat it for several."),
]
ChatTemplateConfig = Annotated[
    str | None,
    typer.Option(help="Options of the chat template, as a JSON object.", metavar="JSON"),
]
PrefillResponse = Annotated[str | None, typer.Option(help="What the answer is to begin with.")]
Seed = Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Seed of the sampling.")]

MaxKVSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="mlx-lm's rotating cache, in entries, of models that make no caches of their own.",
    ),
]
KVGroupSize = Annotated[
    int, typer.Option(callback=_possible_group, help="Values that share a scale: 32, 64 or 128.")
]
KVBits = Annotated[
    int | None,
    typer.Option(callback=_possible, help="Bits of the KV cache's entries: 2, 3, 4, 6 or 8."),
]
QuantizedKVStart = Annotated[
    int | None,
    typer.Option(
        min=0, help="Tokens from which --kv-bits counts, without a policy; mlx-lm's 5000."
    ),
]
Snapkv = Annotated[
    str | None, typer.Option(help='SnapKV with these options, such as "top_k=1024".')
]
Policy = Annotated[
    str | None,
    typer.Option(help='Any policy, such as "keydiff:budget=25%"; see mlx-snapkv policies.'),
]

Memory = Annotated[
    str,
    typer.Option(
        help="Entries that are not kept: gone (drop), or all at hand for later turns and --verify: in memory (recall, "
        "recall:8bit, recall:4bit) or in files (recall:file, recall:file:8bit, recall:file:4bit). A policy that evicts "
        "while it reads, such as keydiff, then reads within its budget."
    ),
]
StoreDir = Annotated[
    Path | None,
    typer.Option(
        callback=_store_in, help="Folder for the files of --memory recall:file; by default TMPDIR."
    ),
]
Verify = Annotated[
    str | None,
    typer.Option(
        help="What an answer does with the entries at hand: doubtful tokens are decoded again from those they vote for "
        "(unsure), or drafts are checked on all of them, for the full cache's own answer (all)."
    ),
]
VerifyBelow = Annotated[
    float,
    typer.Option(
        help="Probability under which a token is doubtful, for --verify unsure. An answer has few votes; with 1 every "
        "token votes."
    ),
]
Far = Annotated[
    str | None,
    typer.Option(
        help="Entries farther away than the model was trained to: turned as if they were nearer (pull), or left where "
        "they are (keep). Without it, pulled if the prompt is longer than that, and the policy evicts while it is read."
    ),
]

Facts = Annotated[int, typer.Option(min=1, max=32, help="Facts to hide and ask for.")]
DocumentSeed = Annotated[int, typer.Option(help="Seed of the documents.")]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no figures on stderr.")]
Verbose = Annotated[
    str, typer.Option(callback=_is_true, help="mlx-lm's name for it: False is --quiet.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
