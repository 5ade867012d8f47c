"""Options that several commands share or that are mlx-lm's own, each declared once."""

from __future__ import annotations

from typing import Annotated

import typer

from ..demo import MODELS
from ..entries.quantization import BITS, GROUP_SIZES
from ..errors import SnapKVError


def _possible(kv_bits: int | None) -> int | None:
    """Raises: SnapKVError: entries can't have so many bits."""
    if kv_bits is not None and kv_bits not in BITS:
        raise SnapKVError(f"--kv-bits must be 2, 3, 4, 6 or 8, got {kv_bits}")
    return kv_bits


def _possible_group(kv_group_size: int) -> int:
    """Raises: SnapKVError: mlx has no such groups."""
    if kv_group_size not in GROUP_SIZES:
        raise SnapKVError(f"--kv-group-size must be 32, 64 or 128, got {kv_group_size}")
    return kv_group_size


Model = Annotated[
    str, typer.Option(help=f"Model folder, Hugging Face repository, or: {', '.join(MODELS)}.")
]
AdapterPath = Annotated[str | None, typer.Option(help="Folder of LoRA adapters.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow a tokenizer's own code.")
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
XtcProbability = Annotated[float, typer.Option(min=0, max=1, help="XTC probability.")]
XtcThreshold = Annotated[float, typer.Option(min=0, max=0.5, help="XTC threshold.")]
Seed = Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Seed of the sampling.")]

MaxKVSize = Annotated[int | None, typer.Option(min=1, help="mlx-lm's rotating cache, in entries.")]
KVGroupSize = Annotated[
    int, typer.Option(callback=_possible_group, help="Values that share a scale: 32, 64 or 128.")
]
KVBits = Annotated[
    int | None,
    typer.Option(callback=_possible, help="Bits of the KV cache's entries: 2, 3, 4, 6 or 8."),
]
Snapkv = Annotated[
    str | None, typer.Option(help='SnapKV with these options, such as "top_k=1024,min_ctx=0".')
]
Policy = Annotated[
    str | None,
    typer.Option(help='Any policy, such as "keydiff:budget=25%"; see mlx-snapkv policies.'),
]

Facts = Annotated[int, typer.Option(min=1, max=32, help="Facts to hide and ask for.")]
DocumentSeed = Annotated[int, typer.Option(help="Seed of the documents.")]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no figures on stderr.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
